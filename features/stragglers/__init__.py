"""Silos that are silent or slow: they are asked less often."""
