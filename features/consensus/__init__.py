"""Consensus: linear models of a group reach the minimum over all its rows."""

MOST_FACTOR = 1e4
"""Largest factor on the length of the steps, and one over the smallest."""
