"""How messages travel: the only package that knows Flower's inside."""
