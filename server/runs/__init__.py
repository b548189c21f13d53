"""One run of a federation: its configuration, the run itself, its record and its checkpoints."""
