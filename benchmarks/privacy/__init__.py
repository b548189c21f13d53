"""What can be read from what leaves a silo, and from a model that is kept: attacks, run."""
