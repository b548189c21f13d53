"""Auto: finds out by a race who should train with whom, and needs no choice."""
