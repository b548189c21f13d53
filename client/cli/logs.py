"""What a silo that serves in the foreground logs."""

from __future__ import annotations

import logging
import sys


def log_to_stderr(*, verbose: bool) -> None:
    """Log what the silo does; what Flower and gRPC do only if it is a warning."""
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO,
        format="%(asctime)s %(levelname)s %(message)s",
        stream=sys.stderr,
    )
    for noisy in ("asyncio", "flwr", "grpc"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
