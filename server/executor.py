"""The executor of ServerApps: ``python -m coterie.server.executor OPTIONS OF flower-superexec``."""

from __future__ import annotations

from coterie.engine.fast.superlink import executor


def prepare() -> None:
    """Import the ServerApp, and read the keys of all strategies: Flower gives a run every one."""
    import coterie.server.app  # noqa: F401
    from coterie.server.runs.config import defaults

    defaults()


if __name__ == "__main__":
    executor.main(prepare)
