"""Coterie's SuperLink: a subclass of Flower's."""
