"""``coterie watch --web``: the live report of an active run.

The server is read-only: it answers GET and HEAD and reads only the run's record. It listens on
loopback by default. Every request needs the token that the command prints, because other accounts
of the machine reach loopback too. A browser sends it once, in the address, and keeps it in a
cookie.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from dataclasses import dataclass
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

from coterie.pictures.page import Page, render, render_body
from coterie.server.paths import default_runs_dir
from coterie.server.report.command import tell
from coterie.server.report.page import build_page
from coterie.server.runs.record import (
    EVENTS,
    RECORD,
    find_run,
    newest_run,
    read_run,
)
from coterie.strategies.errors import EXIT_CONFIG, FederationError
from coterie.system.ports import is_loopback, join_address
from coterie.system.tokens import TokenHandler, TokenServer, new_token

REST = 4.0
"""Pause after a drawing, as a multiple of its time: drawings take at most a fifth of one core."""


@dataclass(frozen=True)
class Shown:
    """A rendered page for browsers."""

    html: str
    body: str
    tag: str
    over: str


class LivePage:
    """The newest state of a run as a page, redrawn when its record has grown.

    ``run`` is a folder, name or id; None takes the newest run, including one that begins later.
    """

    def __init__(self, run: str | None, root: Path | None) -> None:
        self.run, self.root = run, root
        self._lock = threading.Lock()
        self._seen: tuple[object, ...] = ()
        self._shown: Shown | None = None
        self._rests_until = 0.0

    def look(self) -> Shown:
        """Return the current page; only one drawing runs at a time."""
        with self._lock:
            if self._shown is None or time.monotonic() >= self._rests_until:
                self._refresh()
            assert self._shown is not None
            return self._shown

    def _refresh(self) -> None:
        folder = newest_run(self.root) if self.run is None else find_run(self.run, self.root)
        seen = _state(folder)
        if seen == self._seen:
            return
        started = time.monotonic()
        page, over = _page(folder, self.root)
        body = render_body(page)
        tag = hashlib.sha256(body.encode()).hexdigest()[:32]
        self._shown = Shown(render(page, live="body", body=body), body, f'"{tag}"', over)
        self._seen = seen
        spent = time.monotonic() - started
        self._rests_until = time.monotonic() + REST * spent


def _state(folder: Path | None) -> tuple[object, ...]:
    """Return a value that changes whenever the record does."""
    if folder is None:
        return (None,)
    files = [folder / RECORD, folder / EVENTS]
    stats = [file.stat() if file.exists() else None for file in files]
    return folder, *((s.st_mtime_ns, s.st_size) if s else None for s in stats)


def _page(folder: Path | None, root: Path | None) -> tuple[Page, str]:
    if folder is None:
        where = root or default_runs_dir()
        return Page("coterie", f"runs in {where}", "No run is recorded yet. This page waits."), ""
    try:
        story = tell(read_run(folder))
    except FederationError as error:
        return Page(folder.name, str(folder), "This run cannot be read.", missing=[str(error)]), ""
    status = story.run.status
    return build_page(story), status if story.run.ended else ""


class _Handler(TokenHandler):
    server: _Server

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if not self.let_in():
            return
        if path not in ("/", "/body"):
            self.answer(HTTPStatus.NOT_FOUND, "text/plain", "there is / and nothing else\n")
            return
        try:
            shown = self.server.page.look()
        except FederationError as error:
            self.answer(HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", f"{error}\n")
            return
        headers = {"ETag": shown.tag} | ({"X-Run-Over": quote(shown.over)} if shown.over else {})
        if path == "/body" and self.headers.get("If-None-Match") == shown.tag:
            self.answer(HTTPStatus.NOT_MODIFIED, "text/html; charset=utf-8", "", headers)
            return
        text = shown.html if path == "/" else shown.body
        self.answer(HTTPStatus.OK, "text/html; charset=utf-8", text, headers)

    do_HEAD = do_GET


class _Server(TokenServer):
    def __init__(self, address: tuple[str, int], page: LivePage, token: str) -> None:
        self.page = page
        super().__init__(address, _Handler, token=token, command="coterie watch --web")


def make_server(page: LivePage, *, host: str, port: int, token: str) -> ThreadingHTTPServer:
    """Return a server that is bound but not serving yet; port 0 takes any free one.

    Clients must present ``token``.

    Raises:
        FederationError: the address cannot be used.
    """
    try:
        return _Server((host, port), page, token)
    except OSError as error:
        raise FederationError(
            f"cannot listen on {join_address(host, port)}: {error.strerror or error}. Another "
            "--port may be free.",
            exit_code=EXIT_CONFIG,
        ) from None


def serve(run: str | None, *, root: Path | None, host: str, port: int, token: str = "") -> None:
    """Serve until interrupted, with this token or, if it is empty, a new one.

    Raises:
        FederationError: the run does not exist, or the address cannot be used.
    """
    if run is not None:
        find_run(run, root)
    token = token or new_token()
    with make_server(LivePage(run, root), host=host, port=port, token=token) as server:
        address = f"http://{join_address(host, server.server_address[1])}/?token={token}"
        print(f"{address} (Ctrl-C ends it)", flush=True)
        if not is_loopback(host):
            print(
                "Others reach this address: whoever has the token sees the run, and without TLS it "
                "can be read on the way.",
                file=sys.stderr,
                flush=True,
            )
        try:
            server.serve_forever(poll_interval=0.5)
        except KeyboardInterrupt:
            print()
