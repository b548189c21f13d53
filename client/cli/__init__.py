"""The commands of a silo: ``coterie silo …``."""
