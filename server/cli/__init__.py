"""The ``coterie`` command."""
