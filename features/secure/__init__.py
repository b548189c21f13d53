"""Secure aggregation: the coordinator sees sums over groups and sketches, and no silo's update."""
