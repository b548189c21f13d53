"""Auto: find by a race which silos should train together."""
