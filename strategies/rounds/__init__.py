"""The engine: one loop of rounds for every algorithm, and what it is made of."""
