"""Server optimisers: a group's model moves by an optimiser's step instead of to the mean."""
