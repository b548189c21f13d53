"""Built-in image tasks."""
