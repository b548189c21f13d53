"""What a task raises."""

from __future__ import annotations


class TaskError(ValueError):
    """An error in loading a task or its data. The message is for the user."""
