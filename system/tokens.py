"""Local pages for one person: access requires a token that a command has printed.

Other accounts of the machine can also reach loopback. A browser sends the token once, in the
address, and keeps it in a cookie.
"""

from __future__ import annotations

import secrets
from hmac import compare_digest
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs

from coterie.system.ports import is_loopback, names_loopback

HTML = "text/html; charset=utf-8"
ASKS = (
    "<!doctype html><title>coterie</title><p>This page asks for the token in the address that "
    "<code>{}</code> printed.<form><input name=token autofocus></form>"
)
"""The page for requests without a token."""


def new_token() -> str:
    """Return a random token of 128 bits, usable in a URL."""
    return secrets.token_urlsafe(16)


class TokenServer(ThreadingHTTPServer):
    """A server of pages that require a token, which the command ``command`` prints.

    Port 0 in ``address`` takes any free one.
    """

    daemon_threads = True

    def __init__(
        self, address: tuple[str, int], handler: type[TokenHandler], *, token: str, command: str
    ) -> None:
        self.token, self.asks = token, ASKS.format(command)
        self.loopback = is_loopback(address[0])
        super().__init__(address, handler)
        # Cookies are of a host, whatever the port.
        self.cookie = f"coterie-{self.server_address[1]}"


class TokenHandler(BaseHTTPRequestHandler):
    """A request handler that requires the token; a subclass begins every method with ``let_in``."""

    server_version = "coterie"
    sys_version = ""
    timeout = 30.0
    server: TokenServer

    def let_in(self) -> bool:
        """Return whether to go on; if not, the request is already answered."""
        if not self._is_own_host():
            self.answer(HTTPStatus.MISDIRECTED_REQUEST, "text/plain", "another host's name\n")
            return False
        query = parse_qs(self.path.partition("?")[2])
        if token := "".join(query.get("token", [])):
            self._take(token)
            return False
        if not self._is_known():
            self.answer(HTTPStatus.UNAUTHORIZED, HTML, self.server.asks)
            return False
        return True

    def answer(
        self, status: HTTPStatus, kind: str, text: str, headers: dict[str, str] | None = None
    ) -> None:
        """Send a text with headers that prevent browsers from doing more than display it."""
        content = text.encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Log nothing: a browser asks every two seconds."""

    def _take(self, token: str) -> None:
        """Move a valid token from the address into a cookie."""
        if not compare_digest(token.encode(), self.server.token.encode()):
            self.answer(HTTPStatus.UNAUTHORIZED, HTML, self.server.asks)
            return
        cookie = f"{self.server.cookie}={token}; HttpOnly; SameSite=Strict; Path=/"
        headers = {"Set-Cookie": cookie, "Location": "/"}
        self.answer(HTTPStatus.SEE_OTHER, "text/plain", "", headers)

    def _is_known(self) -> bool:
        try:
            kept = SimpleCookie(self.headers.get("Cookie", "")).get(self.server.cookie)
        except CookieError:
            return False
        given = "" if kept is None else kept.value
        return compare_digest(given.encode(), self.server.token.encode())

    def _is_own_host(self) -> bool:
        """Return whether the host is allowed: on loopback only its names, against DNS rebinding."""
        return not self.server.loopback or names_loopback(self.headers.get("Host", ""))
