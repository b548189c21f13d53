"""``coterie silo approve --web``: a local page with the runs that wait."""

from __future__ import annotations

from html import escape
from http import HTTPStatus
from urllib.parse import parse_qs

from coterie.client.cli.approve import announced, decided_on
from coterie.client.home.approvals import Approval, ApprovalError, State, decide, read_all
from coterie.client.home.folder import Home
from coterie.client.home.settings import SettingsError
from coterie.system.tokens import HTML, TokenHandler, TokenServer

HOST = "127.0.0.1"
MAX_FORM = 10_000
"""The largest form in bytes that the page may send back."""
CLOSED = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "form-action 'self'; base-uri 'none'"
}
"""Allows the page itself and nothing else; it has no script."""
AGAIN_S = 30
"""Seconds between two reloads of an open page."""
STYLE = """
:root{color-scheme:light dark}
body{font:1rem/1.5 system-ui,sans-serif;max-width:52rem;margin:0 auto;padding:1rem}
article{border:1px solid #8886;border-radius:.5rem;padding:0 1.25rem 1.25rem;margin:1.5rem 0}
h1{font-size:1.5rem}h2{font-size:1.2rem}h3{font-size:1rem;margin-bottom:.25rem}
h2,dd,li{overflow-wrap:anywhere}ul{margin:0;padding-left:1.25rem}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.25rem 1.25rem;margin:0}
dt{opacity:.7}dd{margin:0}
form{display:flex;gap:.75rem;margin-top:1.25rem}
button{font:inherit;padding:.5rem 1.25rem;border:1px solid #888;border-radius:.35rem;cursor:pointer}
button[value=approved]{background:#1a6b3c;border-color:#1a6b3c;color:#fff}
[role=status]{border-left:4px solid #1a6b3c;padding:.25rem .75rem}
@media(max-width:30rem){dl{display:block}dt{margin-top:.5rem}button{flex:1}}
"""


def page(home: Home, *, said: str = "") -> str:
    """Return the page: the waiting runs, each with its announcement and two buttons."""
    known = read_all(home.folder)
    waiting = [one for one in known if one.state == "waits" and not one.over]
    parts = [_form(one, home) for one in waiting]
    rest = "".join(f"<li>{escape(line)}" for line in decided_on(known))
    note = f"<p role=status>{escape(said)}</p>" if said else ""
    count = f"{len(waiting)} run{'s wait' if len(waiting) != 1 else ' waits'} for approval"
    empty = "" if waiting else "<p>No run is waiting. New ones appear here.</p>"
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<meta http-equiv=refresh content='{AGAIN_S};url=./'>"
        f"<title>{escape(home.config.name)}: approvals</title>"
        f"<style>{STYLE}</style><h1>{escape(home.config.name)}: {count}</h1>{note}{empty}"
        f"{''.join(parts)}{'<h2>Decided</h2><ul>' + rest + '</ul>' if rest else ''}</html>"
    )


def _form(one: Approval, home: Home) -> str:
    shown = announced(one, home)
    facts = "".join(f"<dt>{escape(what)}<dd>{escape(value)}" for what, value in shown.facts)
    leaving = "".join(f"<li>{escape(line)}" for line in shown.leaving)
    return (
        f"<article><h2>{escape(shown.title)}</h2><dl>{facts}</dl>"
        f"<h3>Would leave this silo</h3><ul>{leaving}</ul><form method=post action=./>"
        f'<input type=hidden name=run value="{escape(one.run)}">'
        f'<input type=hidden name=code value="{escape(one.digest)}">'
        "<button name=state value=approved>Approve</button>"
        "<button name=state value=refused>Refuse</button></form></article>"
    )


class _Handler(TokenHandler):
    server: TokenServer[Home]

    def do_POST(self) -> None:
        """Decide on exactly the announcement that the page showed."""
        if not self.let_in():
            return
        length = self.headers.get("Content-Length", "")
        is_short = length.isdecimal() and int(length) <= MAX_FORM
        fields = parse_qs(self.rfile.read(int(length)).decode(errors="replace")) if is_short else {}
        run, code, state = ("".join(fields.get(key, [])) for key in ("run", "code", "state"))
        if state not in ("approved", "refused") or not code:
            self.answer(HTTPStatus.BAD_REQUEST, "expected a decision\n")
            return
        try:
            chosen: State = "approved" if state == "approved" else "refused"
            done = decide(self.server.content.folder, run, chosen, code=code)
            self.show(said=f"Run {done.run} is {done.state}.")
        except ApprovalError as error:
            self.show(said=str(error))

    def show(self, path: str = "/", *, said: str = "") -> None:
        try:
            text = page(self.server.content, said=said)
        except SettingsError as error:
            text = f"<!doctype html><p>{escape(str(error))}"
        self.answer(HTTPStatus.OK, text, HTML, CLOSED)


def make_server(home: Home, *, port: int, token: str) -> TokenServer[Home]:
    """Return a server that is bound and not yet serving; port 0 takes any free one.

    Raises ``MisuseError`` if the port cannot be used.
    """
    command = "coterie silo approve --web"
    return TokenServer((HOST, port), _Handler, home, token=token, command=command)
