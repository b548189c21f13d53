"""HCCT: groups that maximise the silos' utility, and α without guessing."""
