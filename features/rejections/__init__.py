"""Rejections: tell a silo why its last training did not count."""
