"""What is learned: a model, its split into representation and head, one silo's data, a loss.

``load_task("digits")`` returns a built-in task; ``load_task("module:attribute")`` one of the
user's own (see ``docs/how-to/own-task.md``).
"""

from coterie.tasks.base import Passes, RunKey, SiloData, Task, TaskError
from coterie.tasks.registry import BUILT_IN, load_task

__all__ = ["BUILT_IN", "Passes", "RunKey", "SiloData", "Task", "TaskError", "load_task"]
