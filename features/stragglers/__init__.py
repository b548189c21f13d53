"""Stragglers: silos that are silent or slow are asked less often."""
