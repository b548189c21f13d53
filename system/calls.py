"""Calls to a SuperLink over gRPC: channels, and the repetition of calls."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from coterie.system.ports import is_own, split_address


def open_channel(
    address: str,
    certificates: bytes | None,
    *,
    max_bytes: int = 2**31 - 1,
    options: Sequence[tuple[str, Any]] = (),
) -> grpc.Channel:
    """Return a channel to a SuperLink.

    Args:
        address: ``HOST:PORT``.
        certificates: of the CA, PEM; empty: those of this machine; None: plain text.
        max_bytes: of an answer; a longer one is refused with ``RESOURCE_EXHAUSTED``.
        options: of gRPC, in addition to the limits.
    """
    limits = [("grpc.max_send_message_length", 2**31 - 1)]
    limits += [("grpc.max_receive_message_length", max_bytes)]
    if is_own(split_address(address)[0]):
        limits += [("grpc.enable_http_proxy", 0)]
    if certificates is None:
        return grpc.insecure_channel(address, options=[*limits, *options])
    credentials = grpc.ssl_channel_credentials(certificates or None)
    return grpc.secure_channel(address, credentials, options=[*limits, *options])


class Retry:
    """Repeat a call while its error may be temporary.

    Args:
        is_lasting: whether an error is permanent.
        max_s: total seconds; None: no limit.
        first_s, most_s: pauses between attempts double from the first to the second.
    """

    def __init__(
        self,
        is_lasting: Callable[[Any], bool],
        *,
        max_s: float | None,
        first_s: float = 0.25,
        most_s: float = 2.0,
    ) -> None:
        self._is_lasting, self.max_s = is_lasting, max_s
        self._first_s, self._most_s = first_s, most_s

    def invoke(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the call's answer, or raise its last error."""
        began, pause_s = time.monotonic(), self._first_s
        while True:
            try:
                return call(*args, **kwargs)
            except grpc.RpcError as error:
                wait_s = random.uniform(0, pause_s)
                late = self.max_s is not None and time.monotonic() - began + wait_s > self.max_s
                if late or self._is_lasting(error):
                    raise
            time.sleep(wait_s)
            pause_s = min(2 * pause_s, self._most_s)
