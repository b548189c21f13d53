"""Concerns around every round, such as stragglers or early stopping: one folder each.

``coordinator.py`` holds the feature's stage on the coordinator's side (see
``coterie.strategies.rounds.stage``). A feature imports the core and no other feature; the core
imports no feature.
"""
