"""Learning tasks: a model split into representation and head, a silo's data, and a loss.

``load_task("digits")`` returns a built-in task, ``load_task("module:attribute")`` a custom one (see
``docs/how-to/own-task.md``).
"""

from coterie.tasks.base import Passes, RunKey, SiloData, Task, TaskError
from coterie.tasks.registry import BUILT_IN, load_task

__all__ = ["BUILT_IN", "Passes", "RunKey", "SiloData", "Task", "TaskError", "load_task"]
