"""HCCT: groups that maximise the silos' utility, and an automatic choice of α."""
