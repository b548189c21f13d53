"""The baseline strategies that the four papers compare with."""
