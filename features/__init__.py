"""What goes on around every round: each concern is a folder with the halves that it has.

``coordinator.py`` is its stage in the round (``coterie.strategies.rounds.stage``). A feature
imports the core and no other feature; the core imports none.
"""
