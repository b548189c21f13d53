"""Measurements of the engine: time, memory and bytes, as ratios measured side by side in one run."""
