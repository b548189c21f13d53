"""A silo's connection to the SuperLink."""
