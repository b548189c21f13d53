"""The live page: read-only, on loopback, new when the record is."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest

import coterie.server.report.web
from benchmarks.engine.synthetic import write_run
from coterie.server.report.web import LivePage, make_server
from coterie.server.site.audit import verify
from coterie.server.site.federation import create
from coterie.server.site.people import web_token
from coterie.system.commandline import MisuseError


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, str]]:
    """A folder of runs, empty as yet, and the address of its page."""
    monkeypatch.setattr(coterie.server.report.web, "REST", 0.0)
    bound = make_server(LivePage(None, tmp_path), host="127.0.0.1", port=0, token=TOKEN)
    thread = threading.Thread(target=bound.serve_forever, args=(0.05,))
    thread.start()
    yield tmp_path, f"http://127.0.0.1:{bound.server_address[1]}"
    bound.shutdown()
    thread.join()
    bound.server_close()


TOKEN = "right-token"


class _Stays(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:  # type: ignore[override]
        return None


def get(url: str, token: str = f"{TOKEN}/", **headers: str) -> tuple[int, str, dict[str, str]]:
    host, _, path = url.removeprefix("http://").partition("/")
    request = urllib.request.Request(f"http://{host}/{token}{path}", headers=headers)
    try:
        with urllib.request.build_opener(_Stays).open(request, timeout=60) as answer:
            return answer.status, answer.read().decode(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), dict(error.headers)


def test_the_page_waits_for_a_run_then_follows_it(live: tuple[Path, str]) -> None:
    folder, url = live
    status, text, first = get(url + "/")
    assert status == 200 and "No run is recorded yet" in text
    assert "connect-src 'self'" in text and "script-src 'sha256-" in text
    write_run(folder / "a", num_silos=3, num_rounds=2, status="running")
    status, text, second = get(url + "/body")
    assert status == 200 and "site-002" in text and "the run is active" in text
    assert second["ETag"] != first["ETag"] and "X-Run-Over" not in second
    assert get(url + "/body", **{"If-None-Match": second["ETag"]})[0] == 304


def test_a_run_that_is_over_says_so(live: tuple[Path, str]) -> None:
    folder, url = live
    write_run(folder / "a", num_silos=2, num_rounds=1)
    assert get(url + "/body")[2]["X-Run-Over"] == "completed"


def test_nothing_else_can_be_read_and_nothing_written(live: tuple[Path, str]) -> None:
    folder, url = live
    (folder / "secret").write_text("s")
    for path in ("/secret", "/../secret", "/body/..%2fsecret", "/a/run.json", "//etc/passwd"):
        assert get(url + path)[0] == 404
    for method in ("POST", "PUT", "DELETE"):
        request = urllib.request.Request(url + "/", data=b"x", method=method)
        with pytest.raises(urllib.error.HTTPError, match="501"):
            urllib.request.urlopen(request, timeout=10)


def test_without_the_token_nothing_of_a_run_is_told(live: tuple[Path, str]) -> None:
    folder, url = live
    write_run(folder / "a", num_silos=2, num_rounds=1)
    for wrong in ("", "wrong/", f"{TOKEN}x/", "%ff/", "?token=wrong/"):
        for path in ("/", "/body"):
            status, text, headers = get(url + path, wrong, Cookie=f"coterie={TOKEN}")
            assert status == 401 and "needs the token" in text and "site-" not in text
            assert "Set-Cookie" not in headers, "every server of this host would get it"
    status, _, headers = get(url + "/", f"?token={TOKEN}")
    assert (status, headers["Location"]) == (303, f"/{TOKEN}/")
    status, _, headers = get(url + "/body")
    assert status == 200 and "Set-Cookie" not in headers


def test_a_federations_token_stays_until_it_is_replaced(tmp_path: Path) -> None:
    made = create(tmp_path / "study", ["localhost"])
    first = web_token(made)
    assert len(first) >= 20 and web_token(made) == first
    assert (made.folder / "web.token").stat().st_mode & 0o077 == 0
    assert web_token(made, new=True) != first
    assert [act.act for act in verify(made).acts] == ["new web token"] * 2


def test_another_hosts_name_is_refused(live: tuple[Path, str]) -> None:
    """A page elsewhere whose name points here must not read the run (DNS rebinding)."""
    port = int(live[1].rpartition(":")[2])
    for host, status in (("evil.example", 421), (f"localhost:{port}", 200), ("127.0.0.1", 200)):
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", f"/{TOKEN}/", headers={"Host": host})
        assert connection.getresponse().status == status
        connection.close()


def test_a_record_damaged_on_the_way_is_shown_as_such(live: tuple[Path, str]) -> None:
    folder, url = live
    run = write_run(folder / "a", num_silos=2, num_rounds=1)
    (run / "run.json").write_text("{")
    (run / "events.jsonl").write_text(json.dumps([1]) + "\n\n")
    status, text, _ = get(url + "/")
    assert status == 200 and "cannot be read" in text


@pytest.mark.parametrize(
    ("error", "seen"), [(BrokenPipeError(), False), (TimeoutError(), False), (KeyError(), True)]
)
def test_a_browser_that_goes_away_leaves_nothing_on_the_terminal(
    error: Exception, seen: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with make_server(LivePage(None, tmp_path), host="127.0.0.1", port=0, token=TOKEN) as server:
        try:
            raise error
        except type(error):
            server.handle_error(None, ("127.0.0.1", 1))
    assert ("Traceback" in capsys.readouterr().err) is seen


def test_an_address_in_use_is_an_error(live: tuple[Path, str]) -> None:
    port = int(live[1].rpartition(":")[2])
    with pytest.raises(MisuseError, match="cannot listen on"):
        make_server(LivePage(None, live[0]), host="127.0.0.1", port=port, token=TOKEN)
