"""Silos that train nothing, because they have no labels or only test; they get a group's model."""
