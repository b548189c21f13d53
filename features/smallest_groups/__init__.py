"""Smallest groups: how many others a silo wants its update averaged with."""
