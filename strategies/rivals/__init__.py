"""The strategies that the four papers compare with."""
