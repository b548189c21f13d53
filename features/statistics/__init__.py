"""Statistics before any training: counts of the silos' data, and one scale for their numbers."""
