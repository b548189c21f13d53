"""``coterie runs watch --web``: the live report of an active run.

The server is read-only: it answers GET and HEAD and reads only the run's record. It listens on
loopback by default, and every request needs the token that the command prints.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from urllib.parse import quote

from coterie.pictures.page import Page, render, render_body
from coterie.server.paths import default_runs_dir
from coterie.server.report.command import build_story
from coterie.server.report.page import build_page
from coterie.server.runs.record import EVENTS, RECORD, find_run, newest_run, read_run
from coterie.strategies.errors import FederationError
from coterie.system.ports import is_loopback
from coterie.system.tokens import HTML, TokenHandler, TokenServer, new_token

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
        story = build_story(read_run(folder))
    except FederationError as error:
        return Page(folder.name, str(folder), "This run cannot be read.", missing=[str(error)]), ""
    status = story.run.status
    return build_page(story), status if story.run.ended else ""


class _Handler(TokenHandler):
    server: TokenServer[LivePage]
    paths = ("/", "/body")

    def show(self, path: str) -> None:
        try:
            shown = self.server.content.look()
        except FederationError as error:
            self.answer(HTTPStatus.NOT_FOUND, f"{error}\n")
            return
        headers = {"ETag": shown.tag} | ({"X-Run-Over": quote(shown.over)} if shown.over else {})
        if path == "/body" and self.headers.get("If-None-Match") == shown.tag:
            self.answer(HTTPStatus.NOT_MODIFIED, "", HTML, headers)
            return
        self.answer(HTTPStatus.OK, shown.html if path == "/" else shown.body, HTML, headers)


def make_server(page: LivePage, *, host: str, port: int, token: str) -> TokenServer[LivePage]:
    """Return a server that is bound but not serving yet; port 0 takes any free one.

    Clients must present ``token``. Raises ``MisuseError`` if the address cannot be used.
    """
    command = "coterie runs watch --web"
    return TokenServer((host, port), _Handler, page, token=token, command=command)


def serve(run: str | None, *, root: Path | None, host: str, port: int, token: str = "") -> None:
    """Serve until interrupted, with this token or, if it is empty, a new one.

    Raises:
        FederationError: the run does not exist.
        MisuseError: the address cannot be used.
    """
    if run is not None:
        find_run(run, root)
    page = LivePage(run, root)
    with make_server(page, host=host, port=port, token=token or new_token()) as server:
        if not is_loopback(host):
            print(
                "Others reach this address: anyone with the token sees the run, and without TLS it "
                "can be read on the way.",
                file=sys.stderr,
                flush=True,
            )
        server.run()
