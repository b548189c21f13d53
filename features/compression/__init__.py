"""Smaller models on the wire: which silos receive theirs in 16 bits a number."""
