"""``coterie silo approve --web``: the runs that wait, on a page of this machine alone."""

from __future__ import annotations

from html import escape
from http import HTTPStatus
from urllib.parse import parse_qs

from coterie.client.cli.approve import described
from coterie.client.home.approvals import Approval, ApprovalError, State, decide, read_all
from coterie.client.home.folder import Home
from coterie.client.home.settings import SettingsError
from coterie.system.tokens import HTML, TokenHandler, TokenServer, new_token

HOST = "127.0.0.1"
MAX_FORM = 10_000
"""Bytes of what the page sends back."""
CLOSED = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "form-action 'self'; base-uri 'none'"
}
"""Nothing but the page itself: it has no script."""
STYLE = (
    "body{font:1rem/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "pre{white-space:pre-wrap;background:#8881;padding:1rem}button{font:inherit;margin-right:1rem}"
)


def page(home: Home, *, said: str = "") -> str:
    """The runs that wait, each with what it announced and two buttons."""
    known = read_all(home.folder)
    waiting = [one for one in known if one.state == "waits"]
    parts = [_form(one, home) for one in waiting]
    rest = "".join(
        f"<li>{escape(one.run)}: {one.state} {escape(one.decided[:16])} by {escape(one.by)}"
        for one in known
        if one.state != "waits"
    )
    note = f"<p role=status>{escape(said)}</p>" if said else ""
    count = f"{len(waiting)} run{'s wait' if len(waiting) != 1 else ' waits'} for approval"
    return (
        f"<!doctype html><html lang=en><title>{escape(home.config.name)}: approvals</title>"
        f"<style>{STYLE}</style><h1>{escape(home.config.name)}: {count}</h1>{note}"
        f"{''.join(parts)}{'<h2>Decided</h2><ul>' + rest + '</ul>' if rest else ''}</html>"
    )


def _form(one: Approval, home: Home) -> str:
    text = escape("\n".join(described(one, home)))
    return (
        f"<pre>{text}</pre><form method=post action=/>"
        f'<input type=hidden name=run value="{escape(one.run)}">'
        f'<input type=hidden name=code value="{escape(one.digest)}">'
        "<button name=state value=approved>Approve</button>"
        "<button name=state value=refused>Refuse</button></form>"
    )


class _Handler(TokenHandler):
    server: _Server

    def do_GET(self) -> None:
        """The page."""
        if not self.let_in():
            return
        if self.path != "/":
            self.answer(HTTPStatus.NOT_FOUND, "text/plain", "there is / and nothing else\n")
            return
        self._show()

    def do_POST(self) -> None:
        """A decision; of exactly what the page showed."""
        if not self.let_in():
            return
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_FORM:
            self.answer(HTTPStatus.BAD_REQUEST, "text/plain", "expected a decision\n")
            return
        fields = parse_qs(self.rfile.read(int(length)).decode(errors="replace"))
        run, code, state = ("".join(fields.get(key, [])) for key in ("run", "code", "state"))
        if state not in ("approved", "refused") or not code:
            self.answer(HTTPStatus.BAD_REQUEST, "text/plain", "expected a decision\n")
            return
        try:
            chosen: State = "approved" if state == "approved" else "refused"
            done = decide(self.server.home.folder, run, chosen, code=code)
            self._show(f"Run {done.run} is {done.state}.")
        except ApprovalError as error:
            self._show(str(error))

    def _show(self, said: str = "") -> None:
        try:
            text = page(self.server.home, said=said)
        except SettingsError as error:
            text = f"<!doctype html><p>{escape(str(error))}"
        self.answer(HTTPStatus.OK, HTML, text, CLOSED)


class _Server(TokenServer):
    def __init__(self, home: Home, port: int, token: str) -> None:
        self.home = home
        command = "coterie silo approve --web"
        super().__init__((HOST, port), _Handler, token=token, command=command)


def make_server(home: Home, *, port: int, token: str) -> TokenServer:
    """A server that is bound and not yet serving; port 0 takes any free one.

    Raises:
        SettingsError: the port cannot be used.
    """
    try:
        return _Server(home, port, token)
    except OSError as error:
        raise SettingsError(
            f"cannot listen on {HOST}:{port}: {error.strerror}. Another --port may be free."
        ) from None


def serve(home: Home, *, port: int) -> None:
    """Serve until interrupted, with a token of this call's own."""
    token = new_token()
    with make_server(home, port=port, token=token) as server:
        print(
            f"http://{HOST}:{server.server_address[1]}/?token={token} (Ctrl-C ends it)", flush=True
        )
        try:
            server.serve_forever(poll_interval=0.5)
        except KeyboardInterrupt:
            print()
