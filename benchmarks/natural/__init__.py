"""Real organisations' data, with the silos that they came in."""
