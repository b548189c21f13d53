"""Families of models: a task that leaves the choice between a network and trees to ``auto``."""
