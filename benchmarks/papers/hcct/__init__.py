"""HCCT's four experiments and, in ``digits``, its options on the demo's silos."""
