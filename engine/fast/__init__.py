"""The engine of a federation: Flower's messages with fewer calls and fewer copies."""
