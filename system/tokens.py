"""Local pages for one person: access requires a token that a command has printed.

Other accounts of the machine can also reach loopback. The token is the first part of every path. A
cookie would not do: browsers send it to all servers of a host, also to another account's port.
"""

from __future__ import annotations

import secrets
import socket
import sys
from hmac import compare_digest
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Generic, TypeVar
from urllib.parse import parse_qs

from coterie.system.commandline import MisuseError
from coterie.system.ports import is_loopback, join_address, names_loopback

TEXT, HTML = "text/plain; charset=utf-8", "text/html; charset=utf-8"
ASKS = (
    "<!doctype html><title>coterie</title><p>This page needs the token in the address that "
    "<code>{}</code> printed.<form><input name=token autofocus></form>"
)
"""The page for requests without a token."""
SAFE = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
}
"""Headers that prevent browsers from doing more than display a page."""

Content = TypeVar("Content")


def new_token() -> str:
    """Return a random token of 128 bits, usable in a URL."""
    return secrets.token_urlsafe(16)


class LocalServer(ThreadingHTTPServer):
    """An HTTP server that on loopback answers only to its names, against DNS rebinding.

    Port 0 in ``address`` takes any free one.
    """

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[LocalHandler]) -> None:
        self.loopback = is_loopback(address[0])
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a browser that goes away; anything else is shown in full."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    @property
    def address(self) -> str:
        """The address on which it listens."""
        host, port = self.server_address[:2]
        return join_address(str(host), port)


class LocalHandler(BaseHTTPRequestHandler):
    """A handler of GET and HEAD for the pages in ``paths``, which ``show`` sends."""

    server_version = "coterie"
    sys_version = ""
    timeout = 30.0
    server: LocalServer
    paths: tuple[str, ...] = ("/",)

    def do_GET(self) -> None:
        if not self.let_in():
            return
        path = self.path.partition("?")[0]
        if path in self.paths:
            self.show(path)
        else:
            self.answer(HTTPStatus.NOT_FOUND, f"only {self.paths[0]} exists here\n")

    do_HEAD = do_GET

    def show(self, path: str) -> None:
        """Answer a request that was let in."""
        raise NotImplementedError

    def let_in(self) -> bool:
        """Return whether to go on; if not, the request is already answered."""
        if self.server.loopback and not names_loopback(self.headers.get("Host", "")):
            self.answer(HTTPStatus.MISDIRECTED_REQUEST, "another host's name\n")
            return False
        return True

    def answer(
        self, status: HTTPStatus, text: str, kind: str = TEXT, headers: dict[str, str] | None = None
    ) -> None:
        """Send a text with safe headers."""
        content = text.encode()
        self.send_response(status)
        sizes = {"Content-Type": kind, "Content-Length": str(len(content))}
        for name, value in {**(headers or {}), **sizes, **SAFE}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Log nothing: requests come every few seconds."""


class TokenServer(LocalServer, Generic[Content]):
    """A server of pages about ``content`` that require a token, which ``command`` prints.

    Raises:
        MisuseError: the address cannot be used.
    """

    def __init__(
        self,
        address: tuple[str, int],
        handler: type[TokenHandler],
        content: Content,
        *,
        token: str,
        command: str,
    ) -> None:
        self.content, self.token, self.asks = content, token, ASKS.format(command)
        try:
            super().__init__(address, handler)
        except OSError as error:
            raise MisuseError(
                f"cannot listen on {join_address(*address)}: {error.strerror or error}. Another "
                "--port may be free."
            ) from None

    def run(self) -> None:
        """Print the address with the token, and serve until Ctrl-C."""
        print(f"http://{self.address}/{self.token}/ (Ctrl-C ends it)", flush=True)
        try:
            self.serve_forever(poll_interval=0.5)
        except KeyboardInterrupt:
            print()


class TokenHandler(LocalHandler):
    """A handler of pages that require the token; further methods begin with ``let_in``."""

    server: TokenServer[Any]

    def let_in(self) -> bool:
        if not super().let_in():
            return False
        given, slash, rest = self.path.removeprefix("/").partition("/")
        if self._is_known(given) and slash:
            self.path = f"/{rest}"
            return True
        typed = "".join(parse_qs(self.path.partition("?")[2]).get("token", []))
        if self._is_known(typed):
            self.answer(HTTPStatus.SEE_OTHER, "", TEXT, {"Location": f"/{self.server.token}/"})
        else:
            self.answer(HTTPStatus.UNAUTHORIZED, self.server.asks, HTML)
        return False

    def _is_known(self, token: str) -> bool:
        return compare_digest(token.encode(errors="replace"), self.server.token.encode())
