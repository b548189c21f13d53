"""One silo that does what it likes, and a federation that must not mind."""
