"""A silo that withdraws: what is deleted, what stays, and a statement that says both."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from coterie.engine.fast.superlink.leftovers import BusyError
from coterie.server.runs.record import read_run
from coterie.server.site import audit, certificates, enrolled, register, statement, withdrawal
from coterie.server.site.federation import Federation, create, load
from coterie.server.site.statement import verified
from coterie.server.site.withdrawal import finish_all, withdraw
from coterie.strategies.errors import FederationError
from coterie.strategies.rounds import roster as rosters
from coterie.system import files
from coterie.system.files import locked
from tests.commands import coterie
from tests.conftest import digits_config
from tests.kit import run
from tests.unit.server.test_federation import request
from tests.unit.system.disk import Killed

KEYS: dict[str, Any] = {"min-silos": 2, "wait-for-silos": 5}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A federation of a, b and c, with a run of all, one that c joined late, and one without c."""
    federation = create(tmp_path_factory.mktemp("made") / "study", ["localhost"])
    for name in ("a", "b", "c"):
        asked = request(name)[0]
        assert (
            coterie("members", "enrol", asked, "--federation", str(federation.folder)).returncode
            == 0
        )
    for number, (who, churn) in enumerate([("abc", ""), ("abc", "c+3"), ("ab", "")], start=1):
        nodes = [digits_config(name, "abc".index(name)) for name in who]
        folder = federation.runs / f"fedavg-{number}"
        run(folder, nodes, run_id=number, churn=churn, **KEYS)
        if churn:  # one that can go on
            record = json.loads((folder / "run.json").read_text())
            (folder / "run.json").write_text(json.dumps(record | {"status": "stopped"}))
    return federation.folder


@pytest.fixture
def made(study: Path, tmp_path: Path) -> Federation:
    """The same in the test's own folder."""
    return load(Path(shutil.copytree(study, tmp_path / "study")))


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rosters, "POLL_S", 0.001)


def files_of(made: Federation) -> set[str]:
    folders = ("models", "checkpoints")
    found = (f for name in folders for f in made.runs.glob(f"*/{name}/*"))
    return {file.relative_to(made.runs).as_posix() for file in found}


GONE = {
    *(f"fedavg-{run}/models/c.safetensors" for run in (1, 2)),
    *(f"fedavg-1/checkpoints/round-00000{n}.safetensors" for n in (1, 2, 3)),
    "fedavg-2/checkpoints/round-000003.safetensors",
}


def test_its_models_and_checkpoints_go_and_nothing_else(made: Federation) -> None:
    copy = shutil.copytree(made.runs / "fedavg-3", made.runs / "fedavg-4")
    (copy / "events.jsonl").unlink()
    left = {f"fedavg-4/models/c.safetensors{end}" for end in ("", ".7.tmp")}
    for name in left:
        (made.runs / name).write_bytes(b"a model")
    before, gone = files_of(made), GONE | left
    done, file = withdraw(made, "c", who="ada")
    assert before - files_of(made) == gone
    assert {one.file for one in done.deleted} == {f"runs/{name}" for name in gone}
    assert [(one.run, one.first, one.last, list(one.group)) for one in done.averaged] == [
        ("fedavg-1", 1, 3, ["a", "b", "c"]),
        ("fedavg-2", 3, 3, ["a", "b", "c"]),
    ]
    assert done.restart == {"fedavg-2": 2}
    assert {e.name for e in enrolled.read(made.roster) if e.removed} == {"c"}
    assert read_run(made.runs / "fedavg-1").rounds[0].silos.keys() == {"a", "b", "c"}, (
        "records stay"
    )
    acts = [(act.who, act.act) for act in audit.verify(made).acts[-2:]]
    assert acts[0] == ("ada", "withdraw") and acts[1][1] == "withdrawn"
    assert verified(file.read_text(), made.ca.read_bytes()) == done
    again, _ = withdraw(made, "c")
    assert again.deleted == [] and len(again.averaged) == 2, "asking again does no harm"


def test_a_statement_that_was_changed_or_is_another_federations_is_found(
    made: Federation, tmp_path: Path
) -> None:
    folder = str(made.folder)
    printed = coterie("members", "erase", "c", "--yes", "--federation", folder).stdout
    assert "Deleted: 6 files with its models, updates or statistics" in printed
    assert "run fedavg-1, round 1 to 3: models of a, b\n" in printed
    assert "Run fedavg-2 can be resumed after round 2, before it joined.\n" in printed
    assert "Run fedavg-1 " not in printed, "it is complete"
    (file,) = (made.folder / "withdrawals").glob("c-*.json")
    shown = coterie("members", "erase", "--verify", str(file), "--root-certificates", str(made.ca))
    assert shown.returncode == 0 and "Deleted: 6 files" in shown.stdout
    kept = json.loads(file.read_text())
    kept["statement"]["averaged"] = []
    file.write_text(json.dumps(kept))
    changed = coterie("members", "erase", "--verify", str(file), "--federation", folder)
    assert changed.returncode != 0 and "its signature is not from this CA" in changed.stderr
    wrong = ("members", "erase", "--verify", str(file), "--root-certificates")
    said = coterie(*wrong, str(file))
    assert said.returncode == 2 and "expected the federation's tls/ca.pem" in said.stderr
    for content in (b"{}", b"\xff", b"[" * 100_000):
        file.write_bytes(content)
        said = coterie(*wrong, str(made.ca))
        assert said.returncode == 2 and "is not a withdrawal statement:" in said.stderr


def test_a_statement_that_counted_messages_is_read(made: Federation) -> None:
    """Statements say what their release knew; this one's had fields that are gone."""
    _, file = withdraw(made, "c")
    kept = json.loads(file.read_text())["statement"] | {"messages": 3, "objects": 4}
    signature = certificates.sign(made.tls, statement._canonical(kept)).hex()
    text = json.dumps({"statement": kept, "signature": signature})
    assert verified(text, made.ca.read_bytes()).silo == "c"


def test_a_run_that_goes_on_is_named_and_the_withdrawal_is_completed_later(
    made: Federation,
) -> None:
    with locked(made.runs / "fedavg-1"):
        with pytest.raises(FederationError) as caught:
            withdraw(made, "c")
        assert "c is removed, but the withdrawal is not complete" in str(caught.value)
        assert f"coterie runs stop fedavg-1 --federation {made.folder}" in str(caught.value)
        assert {e.name for e in enrolled.read(made.roster) if e.removed} == {"c"}
    said: list[str] = []
    assert (
        coterie("members", "enrol", request("c")[0], "--federation", str(made.folder)).returncode
        == 0
    )
    finish_all(made, said.append)
    assert "c" in {e.name for e in enrolled.read(made.roster) if not e.removed}, "with a new key"
    assert "The withdrawal of silo c is complete." in said[0]
    assert not files_of(made) & GONE
    (file,) = (made.folder / "withdrawals").glob("c-*.json")
    assert len(verified(file.read_text(), made.ca.read_bytes()).deleted) == 6


class _SuperLink:
    """In place of a real one: runs that hold their folders, and end when they are stopped."""

    def __init__(self, folders: list[Path], *, stubborn: bool = False) -> None:
        self.holding = {folder: ExitStack() for folder in folders}
        for folder, stack in self.holding.items():
            stack.enter_context(locked(folder))
        self.stopped: list[int] = []
        self.stubborn = stubborn

    @contextmanager
    def control(self, *_: Any, **__: Any) -> Iterator[_SuperLink]:
        yield self

    def runs(self) -> list[Any]:
        return [SimpleNamespace(run_id=number, ended=False) for number in (1, 2, 3)]

    def stop(self, run_id: int) -> bool:
        self.stopped.append(run_id)
        if not self.stubborn:
            next(s for f, s in self.holding.items() if f.name.endswith(f"-{run_id}")).close()
        return True

    def __enter__(self) -> _SuperLink:
        return self

    def __exit__(self, *_: object) -> None:
        for stack in self.holding.values():
            stack.close()


@pytest.mark.parametrize("stubborn", [False, True])
def test_runs_that_go_on_with_it_are_stopped_and_others_are_not(
    made: Federation, stubborn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(withdrawal, "answers", lambda _: True)
    monkeypatch.setattr(withdrawal, "sync_superlink", lambda _: {})
    monkeypatch.setattr(withdrawal, "STOP_DEADLINE_S", 0.5)
    # One that has c in a round which is not over, and no file of it yet.
    beginning = made.runs / "fedavg-3"
    with (beginning / "events.jsonl").open("a") as events:
        events.write('{"event": "here", "at": 0.0, "round": 4, "silos": ["a", "b", "c"]}\n')
    other = made.runs / "hcct-4"
    other.mkdir()
    (other / "events.jsonl").write_text('{"event": "here", "round": 1, "silos": ["a", "b"]}\n')
    said: list[str] = []
    going = [made.runs / "fedavg-1", beginning, other]
    with _SuperLink(going, stubborn=stubborn) as superlink:
        monkeypatch.setattr(withdrawal, "control", superlink.control)
        if stubborn:
            with pytest.raises(
                FederationError, match="is active and has its models: coterie runs stop"
            ):
                withdraw(made, "c", say=said.append)
            assert (made.folder / "withdrawals" / "c.intent").exists()
            return
        done, file = withdraw(made, "c", say=said.append)
    assert superlink.stopped == [1, 3]
    assert said == [
        "Stopping run fedavg-1, which has models of c.",
        "Stopping run fedavg-3, which has models of c.",
    ]
    assert done.stopped == ("fedavg-1", "fedavg-3")
    lines = "\n".join(statement.lines_of(verified(file.read_text(), made.ca.read_bytes())))
    assert "Stopped because they contained its models: fedavg-1, fedavg-3." in lines


def test_its_statistics_and_databases_that_were_set_aside_go_too(
    made: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made.runs / "statistics-9"
    folder.mkdir()
    (folder / "events.jsonl").write_text('{"event": "here", "round": 1, "silos": ["b", "c"]}\n')
    others = made.runs / "statistics-8"
    others.mkdir()
    (others / "events.jsonl").write_text('{"event": "here", "round": 1, "silos": ["b", "x c"]}\n')
    names = ("statistics.json", "report.html", "report.json", "report/column-0.png")
    names += ("statistics.json.7.tmp",)
    for one in (folder, others):
        (one / "report").mkdir()
        for name in names:
            (one / name).write_text("numbers")
    lost = made.runs / "statistics-7"
    lost.mkdir()
    (lost / "run.json").write_text('{"status": "completed", "silos": {"c": {}}}')
    (lost / "statistics.json").write_text("numbers")
    damaged = made.folder / "superlink.db.damaged-20260101-000000"
    damaged.write_bytes(b"messages")
    unlink = Path.unlink

    def killed(file: Path, **options: bool) -> None:
        if file.name == "report.html":
            raise Killed
        unlink(file, **options)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(Path, "unlink", killed)
        withdraw(made, "c")
    done, _ = withdraw(made, "c")
    gone = {f"runs/statistics-9/{name}" for name in names} | {"runs/statistics-7/statistics.json"}
    assert gone | {damaged.name} <= {one.file for one in done.deleted}
    assert not damaged.exists() and not any((folder / name).exists() for name in names)
    assert all((others / name).exists() for name in names)


def test_a_database_that_is_in_use_keeps_the_withdrawal_open(
    made: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(*_: Any) -> None:
        raise BusyError("The database cannot be cleaned now.")

    with monkeypatch.context() as patched:
        patched.setattr(withdrawal, "forget_ended_runs", busy)
        with pytest.raises(FederationError, match=r"cannot be cleaned now\. Then run"):
            withdraw(made, "c")
    assert not list((made.folder / "withdrawals").glob("c-*.json")), "nothing is claimed"
    said: list[str] = []
    finish_all(made, said.append)
    assert "The withdrawal of silo c is complete." in said[0]


def test_what_would_be_deleted_is_listed_and_nothing_is_changed(made: Federation) -> None:
    before, folder = files_of(made), str(made.folder)
    said = coterie("members", "erase", "c", "--dry-run", "--federation", folder).stdout
    assert {f"runs/{name}" for name in GONE} == {
        line.strip() for line in said.splitlines() if line.startswith("  ")
    }
    assert "would stop: no run" in said and "and 6 files (" in said
    with locked(made.runs / "fedavg-1"):
        assert "would stop: fedavg-1" in "\n".join(withdrawal.planned(made, "c"))
    assert files_of(made) == before and not any(e.removed for e in enrolled.read(made.roster))
    assert not (made.folder / "withdrawals").exists()
    assert coterie("members", "erase", "d", "--dry-run", "--federation", folder).returncode != 0
    elsewhere = coterie("members", "erase", "c", "--dry-run", "--superlink", "127.0.0.1:1")
    assert elsewhere.returncode == 2 and "use it on the coordinator" in elsewhere.stderr


@pytest.mark.parametrize(
    ("answer", "options", "gone"), [("n", [], 0), ("y", [], 1), ("", ["-y"], 1)]
)
@pytest.mark.parametrize("command", ["remove", "erase"])
def test_whoever_types_it_is_asked_first(
    command: str,
    answer: str,
    options: list[str],
    gone: int,
    made: Federation,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    asked: list[str] = []

    def confirm(question: str, *, abort: bool) -> None:
        asked.append(question)
        if answer != "y":
            raise typer.Abort

    monkeypatch.setattr(typer, "confirm", confirm)
    done = coterie("members", command, "c", "--federation", str(made.folder), *options)
    assert (done.returncode == 0) is bool(gone) and len(asked) == (not options)
    assert sum(bool(entry.removed) for entry in enrolled.read(made.roster)) == gone


@pytest.mark.parametrize("command", ["remove", "erase"])
def test_a_script_has_to_say_yes(command: str, made: Federation) -> None:
    line = ("members", command, "c", "--federation", str(made.folder))
    refused = coterie(*line)
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"coterie: {command.title()} c?")
    assert refused.stderr.endswith("There is no terminal at which to ask: add --yes.\n")
    assert not any(entry.removed for entry in enrolled.read(made.roster))
    assert coterie(*line, "--yes").returncode == 0
    assert sum(bool(entry.removed) for entry in enrolled.read(made.roster)) == 1


def test_who_was_never_enrolled_cannot_withdraw(made: Federation) -> None:
    for name in ("d", "../a"):
        with pytest.raises(FederationError, match="was ever enrolled"):
            withdraw(made, name)
    assert coterie("members", "erase", "--federation", str(made.folder)).returncode == 2


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.nightly), 4])
def test_a_kill_at_any_point_is_made_up_for(
    made: Federation, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ends before its first, second, … change of a file; then the next start comes."""
    count, stop = 0, 0

    def dying(inner: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == stop:
                raise Killed
            return inner(*args, **options)

        return call

    for module in (withdrawal, register, audit):
        monkeypatch.setattr(module, "write_atomically", dying(files.write_atomically))
    monkeypatch.setattr(audit, "append_line", dying(files.append_line))
    monkeypatch.setattr(Path, "unlink", dying(Path.unlink))
    forget = withdrawal.forget_ended_runs
    monkeypatch.setattr(withdrawal, "forget_ended_runs", dying(forget))
    expected = files_of(made) - GONE
    killed = 0
    while True:
        count, stop = 0, every * (killed + 1)
        try:
            withdraw(made, "c")
            break
        except Killed:
            killed += 1
    stop = 0
    assert killed >= 3 or every > 1
    finish_all(made, print)
    assert files_of(made) == expected
    (file,) = (made.folder / "withdrawals").glob("c-*.json")
    done = verified(file.read_text(), made.ca.read_bytes())
    assert {one.file for one in done.deleted} == {f"runs/{name}" for name in GONE}
    assert audit.verify(made).findings == []
