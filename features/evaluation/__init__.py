"""How good given models are at every silo, in a run that trains nothing."""
