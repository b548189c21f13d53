"""A run's connection to the SuperLink."""
