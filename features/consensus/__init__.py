"""Consensus: linear models of a group reach the minimum over all its rows."""
