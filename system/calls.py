"""Calls to a SuperLink over gRPC, as in Flower up to 1.34, or over HTTP, as in Flower now.

Both use a ``grpc.Channel`` and the same messages, so that calls, error codes, deadlines and
metadata are the same for the caller. Over HTTP the method ``/flwr.proto.Fleet/PullMessages`` is
``POST /v1/fleet/pull-messages``, metadata are headers (bytes in base64), and each part of a
streamed answer follows its length. The protocol of an address is probed (``speaks_http``), not
inferred from the Flower installed here: a coordinator may be upgraded at another time than its
silos.
"""

from __future__ import annotations

import base64
import json
import random
import re
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.request import getproxies, proxy_bypass

import grpc
import urllib3

from coterie.system.ports import is_own, split_address

PROBE_S = 2.0
"""Seconds that an address may take to connect, and to answer the probe."""
CONNECT_S = 10.0
CONNECTIONS = 8
"""Most HTTP connections of a channel: a proxy may limit them per address."""
PROTOBUF, PARTS = "application/protobuf", "application/flower-protobuf-stream"
MAX_ERROR_BYTES = 64_000
CLOCK_S = 4.0
"""Clock difference in seconds that may explain a refusal: a SuperLink allows 5."""
CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.UNAVAILABLE,
    409: grpc.StatusCode.ALREADY_EXISTS,
    412: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.UNAVAILABLE,
    500: grpc.StatusCode.INTERNAL,
    501: grpc.StatusCode.UNIMPLEMENTED,
    502: grpc.StatusCode.UNAVAILABLE,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.UNAVAILABLE,
}
"""HTTP status → Flower's gRPC code in the same case."""


def open_channel(
    address: str,
    certificates: bytes | None,
    *,
    http: bool | None = None,
    max_bytes: int = 2**31 - 1,
    options: Sequence[tuple[str, Any]] = (),
) -> grpc.Channel:
    """Return a channel to a SuperLink, over the protocol that it speaks.

    Args:
        address: ``HOST:PORT``.
        certificates: of the CA, PEM; empty: those of this machine; None: plain text.
        http: whether it speaks HTTP; None probes it.
        max_bytes: of an answer; a longer one is refused with ``RESOURCE_EXHAUSTED``.
        options: for gRPC, in addition to the limits.
    """
    if speaks_http(address, certificates) if http is None else http:
        return HttpChannel(address, certificates, max_bytes=max_bytes)
    limits = [("grpc.max_send_message_length", 2**31 - 1)]
    limits += [("grpc.max_receive_message_length", max_bytes)]
    if is_own(split_address(address)[0]):
        limits += [("grpc.enable_http_proxy", 0)]
    if certificates is None:
        return grpc.insecure_channel(address, options=[*limits, *options])
    credentials = grpc.ssl_channel_credentials(certificates or None)
    return grpc.secure_channel(address, credentials, options=[*limits, *options])


def calls_of(
    channel: grpc.Channel, service: str, answers: Mapping[str, Callable[[bytes], Any]]
) -> dict[str, Callable[..., Any]]:
    """Return calls of protobuf messages; Flower's own stubs vary between releases.

    ``answers`` is call → parser of its answer, in a service such as ``Fleet``. A name with a slash
    is one of our own calls.
    """
    return {
        name: channel.unary_unary(
            name if "/" in name else f"/flwr.proto.{service}/{name}",
            request_serializer=lambda request: request.SerializeToString(),
            response_deserializer=read,
        )
        for name, read in answers.items()
    }


def speaks_http(address: str, certificates: bytes | None) -> bool:
    """Return whether a SuperLink that speaks HTTP answers there; arguments as for ``open_channel``.

    It is also False if nothing answers, or with a wrong certificate: gRPC then reports the error.
    """
    timeout = urllib3.Timeout(connect=PROBE_S, read=PROBE_S)
    url = f"{'http' if certificates is None else 'https'}://{address}/health"
    with (
        suppress(urllib3.exceptions.HTTPError, OSError, ValueError),
        _pool(address, _context(certificates), timeout) as pool,
    ):
        # A gRPC server closes the connection; what stands before one says that it cannot.
        return bool(pool.request("GET", url, retries=False, redirect=False).status == 200)
    return False


class HttpError(grpc.RpcError):  # type: ignore[misc]
    """A failed call over HTTP, as a gRPC error."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{code.name}: {details}")
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details


class HttpChannel(grpc.Channel):  # type: ignore[misc]
    """Calls over HTTP; arguments as for ``open_channel``."""

    def __init__(self, address: str, certificates: bytes | None, *, max_bytes: int) -> None:
        self._base = f"{'http' if certificates is None else 'https'}://{address}"
        self._max_bytes = max_bytes
        self._pool = _pool(address, _context(certificates), urllib3.Timeout(connect=CONNECT_S))

    def unary_unary(
        self,
        method: str,
        request_serializer: Callable[[Any], bytes] | None = None,
        response_deserializer: Callable[[bytes], Any] | None = None,
        _registered_method: bool | None = None,
    ) -> Callable[..., Any]:
        read = response_deserializer or bytes

        def call(request: Any, timeout: float | None = None, metadata: Any = None, **_: Any) -> Any:
            body = request_serializer(request) if request_serializer else request
            deadline = None if timeout is None else time.monotonic() + timeout
            answer = self._send(method, body, PROTOBUF, metadata, timeout)
            try:
                return read(b"".join(self._parts(answer, deadline)))
            finally:
                answer.release_conn()

        return call

    def unary_stream(
        self,
        method: str,
        request_serializer: Callable[[Any], bytes] | None = None,
        response_deserializer: Callable[[bytes], Any] | None = None,
        _registered_method: bool | None = None,
    ) -> Callable[..., Iterator[Any]]:
        read = response_deserializer or bytes

        def call(
            request: Any, timeout: float | None = None, metadata: Any = None, **_: Any
        ) -> Iterator[Any]:
            body = request_serializer(request) if request_serializer else request
            deadline = None if timeout is None else time.monotonic() + timeout
            answer = self._send(method, body, PARTS, metadata, timeout)
            held = bytearray()
            try:
                for part in self._parts(answer, deadline):
                    held += part
                    while len(held) >= 4 and len(held) >= (end := 4 + _length(held)):
                        yield read(bytes(held[4:end]))
                        del held[:end]
            finally:
                answer.close()

        return call

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        """Raise ``NotImplementedError``: Flower makes no such call."""
        raise NotImplementedError

    stream_stream = stream_unary

    def subscribe(self, callback: Callable[[Any], None], try_to_connect: bool = False) -> None:
        """Report the channel as ready: it answered when it was opened."""
        callback(grpc.ChannelConnectivity.READY)

    def unsubscribe(self, callback: Callable[[Any], None]) -> None:
        """Do nothing, as no further states are reported."""

    def close(self) -> None:
        self._pool.clear()

    def __enter__(self) -> HttpChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(
        self, method: str, body: bytes, accepted: str, metadata: Any, timeout: float | None
    ) -> urllib3.BaseHTTPResponse:
        headers = dict(_header(name, value) for name, value in metadata or ())
        headers |= {"content-type": PROTOBUF, "accept": accepted, "accept-encoding": "identity"}
        waits = urllib3.Timeout(connect=CONNECT_S, read=timeout)
        try:
            answer = self._pool.request(
                *("POST", self._base + path_of(method)),
                body=body,
                headers=headers,
                timeout=waits,
                retries=False,
                redirect=False,
                preload_content=False,
            )
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise _lost(error) from error
        if answer.status == 200:
            return answer
        try:
            said = answer.read(MAX_ERROR_BYTES)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise _lost(error) from error
        finally:
            answer.close()
        code = CODES.get(answer.status, grpc.StatusCode.UNKNOWN)
        raise HttpError(code, _words(answer.status, said) + _clock(answer))

    def _parts(self, answer: urllib3.BaseHTTPResponse, deadline: float | None) -> Iterator[bytes]:
        size = 0
        try:
            while part := answer.read1(1 << 20) if answer.chunked else answer.read(1 << 20):
                size += len(part)
                if size > self._max_bytes:
                    raise HttpError(
                        grpc.StatusCode.RESOURCE_EXHAUSTED,
                        f"the answer is longer than {self._max_bytes:,} bytes",
                    )
                if deadline is not None and time.monotonic() > deadline:
                    raise HttpError(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
                yield part
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise _lost(error) from error
        except HttpError:
            answer.close()
            raise


def path_of(method: str) -> str:
    """Return the HTTP path of a gRPC method; a method that is not Flower's keeps its name."""
    service, _, name = method.removeprefix("/").rpartition("/")
    if not service.startswith("flwr.proto."):
        return method
    words = re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower()
    return f"/v1/{service.removeprefix('flwr.proto.').lower()}/{words}"


def method_of(path: str) -> str:
    """Return the inverse of ``path_of``."""
    found = re.fullmatch(r"/v1/([a-z]+)/([a-z-]+)", path)
    if found is None:
        return path
    name = "".join(word.capitalize() for word in found[2].split("-"))
    return f"/flwr.proto.{found[1].capitalize()}/{name}"


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


def _pool(
    address: str, context: ssl.SSLContext | None, timeout: urllib3.Timeout
) -> urllib3.PoolManager:
    own: dict[str, Any] = {"timeout": timeout, "maxsize": CONNECTIONS, "block": True}
    own |= {} if context is None else {"ssl_context": context}
    proxy, host = (
        getproxies().get("http" if context is None else "https"),
        split_address(address)[0],
    )
    if proxy and not is_own(host) and not proxy_bypass(host):
        return urllib3.ProxyManager(proxy, **own)
    return urllib3.PoolManager(**own)


def _context(certificates: bytes | None) -> ssl.SSLContext | None:
    if certificates is None:
        return None
    context = ssl.create_default_context(cadata=certificates.decode("ascii") or None)
    context.set_alpn_protocols(["http/1.1"])  # by which it is told from gRPC
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as gRPC has it
    return context


def _header(name: str, value: str | bytes) -> tuple[str, str]:
    if isinstance(value, bytes):
        return name.removesuffix("-bin"), base64.b64encode(value).decode()
    return name, value


def _lost(error: Exception) -> HttpError:
    if isinstance(error, urllib3.exceptions.ReadTimeoutError):
        return HttpError(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
    return HttpError(grpc.StatusCode.UNAVAILABLE, str(error))


def _words(status: int, said: bytes) -> str:
    with suppress(ValueError, KeyError, TypeError):
        told = json.loads(said)
        more = f" {told['extra']}" if told.get("extra") else ""
        return f"{told['detail']}{more}"
    return f"status {status} over HTTP"


def _clock(answer: urllib3.BaseHTTPResponse) -> str:
    """Return a hint on clock skew after a 401, as Flower's HTTP API does not mention timestamps."""
    if answer.status != 401:
        return ""
    try:
        off = (datetime.now(UTC) - parsedate_to_datetime(answer.headers["date"])).total_seconds()
    except (KeyError, ValueError, TypeError):
        return ""
    return f" (its timestamp is {off:+.0f} s off)" if not -300 < off < CLOCK_S else ""


def _length(held: bytearray) -> int:
    return int.from_bytes(held[:4], "big")
