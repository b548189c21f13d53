"""Early stopping on the silos' validation error."""
