"""Concerns around every round, such as stragglers or secure aggregation: one folder each.

``coordinator.py`` holds the feature's stage at the coordinator
(``coterie.strategies.rounds.stage``), ``silo.py`` the one at the silo
(``coterie.client.work.stage``); neither imports the other. A feature imports the core and no other
feature; the core imports no feature.
"""
