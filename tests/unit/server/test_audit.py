"""The log of operators' acts: what is done is in it, and what is done to it is found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from coterie.server.site import audit
from coterie.server.site.audit import AUDIT, HEAD, note, verify
from coterie.server.site.federation import Federation, create, load
from coterie.strategies.errors import FederationError
from tests.commands import coterie


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create(tmp_path_factory.mktemp("audit") / "made", ["fl.example.org"]).folder


@pytest.fixture
def made(empty: Path) -> Federation:
    """With five acts."""
    for name in (AUDIT, HEAD):
        (empty / name).unlink(missing_ok=True)
    federation = load(empty)
    for number in range(5):
        note(federation, "enrol", who="ada", silo=f"silo-{number}")
    return federation


def lines_of(made: Federation) -> list[bytes]:
    return (made.folder / AUDIT).read_bytes().splitlines(keepends=True)


def put(made: Federation, lines: list[bytes]) -> None:
    (made.folder / AUDIT).write_bytes(b"".join(lines))


def changed(line: bytes) -> bytes:
    return line.replace(b"ada", b"bob")


def odd(line: bytes, **values: object) -> bytes:
    return json.dumps(json.loads(line) | values).encode() + b"\n"


def rechained(lines: list[bytes]) -> list[bytes]:
    """A new history that follows from itself, by somebody without the CA's key."""
    made, before = [], audit.NOTHING
    for line in lines:
        act = json.loads(line) | {"who": "bob", "before": before, "number": len(made) + 1}
        made.append(json.dumps(act).encode() + b"\n")
        before = audit._hash(made[-1].rstrip())
    return made


TAMPERED: dict[str, tuple[Callable[[list[bytes]], list[bytes]], str]] = {
    "changed": (lambda ls: [*ls[:2], changed(ls[2]), *ls[3:]], "line 4 does not follow"),
    "removed": (lambda ls: [*ls[:2], *ls[3:]], "line 4 does not follow"),
    "first removed": (lambda ls: ls[1:], "line 2 does not follow"),
    "in another order": (lambda ls: [ls[0], ls[2], ls[1], *ls[3:]], "line 3 does not follow"),
    "added": (lambda ls: [*ls[:2], ls[1], *ls[2:]], "line 2 does not follow"),
    "no time": (lambda ls: [ls[0], odd(ls[1], at="now"), *ls[2:]], "bytes are not a valid line"),
    "no text": (lambda ls: [ls[0], odd(ls[1], about={"silo": 5}), *ls[2:]], "bytes are not a"),
    "unreadable": (lambda ls: [ls[0], b"?\n", *ls[2:]], "before line 3, 1 bytes"),
    "last changed": (lambda ls: [*ls[:4], changed(ls[4])], "a different end:"),
    "cut off": (lambda ls: ls[:3], "lines were changed, or truncated at its end."),
    "emptied": (lambda ls: [], "lines were changed, or truncated at its end."),
    "written anew": (rechained, "a different end:"),
}


@pytest.mark.parametrize("how", TAMPERED)
def test_what_is_done_to_the_log_is_found(made: Federation, how: str) -> None:
    assert verify(made).findings == []
    tamper, said = TAMPERED[how]
    put(made, tamper(lines_of(made)))
    assert any(said in finding for finding in verify(made).findings)
    done = coterie("federation", "audit", "--verify", "--federation", str(made.folder))
    assert done.returncode == 1 and said in done.stdout
    listed = coterie("federation", "audit", "--federation", str(made.folder))
    assert listed.returncode == 0 and said in listed.stdout
    note(made, "remove", silo="silo-1")
    assert verify(made).findings, "an act afterwards does not hide it"


def test_a_head_that_the_federation_did_not_sign_is_found(made: Federation) -> None:
    put(made, lines_of(made)[:3])
    last = audit._hash(lines_of(made)[2].rstrip())
    head = json.loads((made.folder / HEAD).read_text())
    (made.folder / HEAD).write_text(json.dumps(head | {"lines": 3, "hash": last}))
    assert "its signature is not the federation's" in verify(made).findings[0]
    (made.folder / HEAD).unlink()
    assert verify(made).findings == ["audit.head was removed."]


def test_an_older_log_with_its_head_is_found_by_a_head_noted_elsewhere(made: Federation) -> None:
    before = {name: (made.folder / name).read_bytes() for name in (AUDIT, HEAD)}
    note(made, "remove", silo="silo-1")
    noted = verify(made).head
    assert not verify(made, head=noted).findings
    for name, content in before.items():
        (made.folder / name).write_bytes(content)
    assert verify(made).findings == [], "nothing in the folder tells"
    assert "does not contain the noted head" in verify(made, head=noted).findings[0]
    with pytest.raises(FederationError, match="a head must be NUMBER:HASH"):
        verify(made, head="12")


@pytest.mark.parametrize("left", [1, 40, -1])
def test_a_line_that_a_kill_cut_off_is_said_and_the_log_goes_on(
    made: Federation, left: int
) -> None:
    head = (made.folder / HEAD).read_bytes()
    note(made, "remove", silo="silo-1")
    *lines, last = lines_of(made)
    put(made, [*lines, last[:left]])
    (made.folder / HEAD).write_bytes(head)  # it comes after the line
    torn = verify(made)
    if left == -1:  # all but the end of the line
        assert len(torn.acts) == 6 and "line 6 is not in audit.head" in torn.findings[0]
    else:
        assert torn.findings == [] and len(torn.acts) == 5 and torn.notes
    note(made, "enrol", silo="silo-9")
    mended = verify(made)
    assert mended.findings == []
    assert [act.number for act in mended.acts] == [*range(1, len(mended.acts) + 1)]
    assert left == -1 or "a crash truncated a line" in mended.notes[0]


def test_a_last_line_that_the_head_lacks_is_a_finding_until_the_next_act(made: Federation) -> None:
    """By a kill, or by hand: anyone who can write the file can make the line that follows."""
    head = (made.folder / HEAD).read_bytes()
    forged = json.loads(lines_of(made)[-1]) | {"number": 6, "act": "remove", "silo": "silo-1"}
    del forged["silo"]
    forged["before"] = verify(made).last
    put(made, [*lines_of(made), json.dumps(forged).encode() + b"\n"])
    (found,) = verify(made).findings
    assert found.startswith("line 6 is not in audit.head: a crash came between the two, or someone")
    command = coterie("federation", "audit", "--verify", "--federation", str(made.folder))
    assert command.returncode == 1 and "line 6 is not in audit.head" in command.stdout
    note(made, "enrol", silo="silo-9")
    assert verify(made).findings == [] and "line 6 was written" in verify(made).notes[0]
    (made.folder / HEAD).write_bytes(head)
    put(made, lines_of(made) + rechained(lines_of(made))[-1:])
    assert verify(made).findings


def test_a_log_that_was_removed_with_its_head_is_found(made: Federation) -> None:
    for name in (AUDIT, HEAD):
        (made.folder / name).unlink()
    command = coterie("federation", "audit", "--verify", "--federation", str(made.folder))
    assert command.returncode == 1 and "the log is empty: it was removed" in command.stdout


def test_what_cannot_be_noted_is_not_done(
    made: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(audit, "append_line", full)
    done = []
    with (
        pytest.raises(FederationError, match="so it was not done: no space left"),
        audit.acting(made, "remove", silo="x"),
    ):
        done.append("removed")
    assert not done


def test_the_operators_commands_are_in_the_log(tmp_path: Path) -> None:
    folder, silo = str(tmp_path / "study"), str(tmp_path / "b")
    assert coterie("federation", "init", folder, "--address", "fl.example.org").returncode == 0
    request = coterie("silo", "init", "--name", "b", "--home", silo).stdout
    assert coterie("members", "enrol", request, "--federation", folder).returncode == 0
    assert coterie("members", "remove", "b", "--yes", "--federation", folder).returncode == 0
    assert coterie("members", "remove", "c", "--yes", "--federation", folder).returncode == 2
    assert coterie("federation", "init", folder, "--renew").returncode == 0
    acts = verify(load(Path(folder))).acts
    assert [act.act for act in acts] == [
        "init", "enrol", "remove", "remove", "remove failed", "renew",
    ]  # fmt: skip
    assert acts[1].about["silo"] == "b" and "no silo 'c' is enrolled" in acts[4].about["why"]
    shown = coterie("federation", "audit", "--federation", folder).stdout
    assert "silo b, key" in shown and f"head: {len(acts)}:" in shown
    assert coterie("federation", "audit", "--verify", "--federation", folder).returncode == 0
