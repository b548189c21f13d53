"""What a silo is asked to do: train, evaluate, and the phases of algorithms."""
