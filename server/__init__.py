"""The coordinator: ServerApp, run configuration, records of runs, and the ``coterie`` command."""
