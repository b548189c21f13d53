"""Measurements of the engine: time, memory and bytes, as ratios of what is measured in turn."""
