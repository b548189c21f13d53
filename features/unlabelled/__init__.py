"""Silos without labels: they train nothing, and get the model of the group most like them."""
