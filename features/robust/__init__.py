"""Robust aggregation: clipping, capped weights, and quarantine."""
