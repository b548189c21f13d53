"""Measurements, each one command; results are ratios of things measured side by side in one run."""
