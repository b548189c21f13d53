"""Simulations, comparisons and the demo: many silos on one machine."""
