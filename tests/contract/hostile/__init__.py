"""Faults of networks and machines, and hostile peers."""
