"""A federation across organisations: its folder, who is enrolled, its certificates."""
