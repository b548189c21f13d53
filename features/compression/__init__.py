"""Smaller models on the wire: which silos receive theirs as 16-bit numbers."""
