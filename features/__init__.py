"""Concerns around every round, such as stragglers or secure aggregation: one folder each.

``coordinator.py`` holds the feature's stage on the coordinator's side (see
``coterie.strategies.rounds.stage``), ``silo.py`` the one on the silo's
(``coterie.client.work.stage``); neither half imports the other. A feature imports the core and no
other feature; the core imports no feature.
"""
