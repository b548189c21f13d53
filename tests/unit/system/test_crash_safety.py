"""Every file that matters, with a kill or a power cut between any two file-system calls.

Whatever was interrupted, what is there afterwards is the old or the new content, whole, private
where it must be, and the next start works. What was completed outlasts a power cut.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from safetensors.numpy import load

from coterie import wire
from coterie.client.home import approvals, folder, rounds
from coterie.client.home.folder import Home
from coterie.client.home.policy import Policy
from coterie.client.home.settings import SettingsError, SiloSettings
from coterie.features.statistics.survey import Survey, read_survey, write_survey
from coterie.server.runs.checkpoint import Checkpoints
from coterie.server.runs.config import RunConfig
from coterie.server.runs.record import Recorder, read_unfinished, read_whole
from coterie.server.site import audit, enrolled, federation
from coterie.server.site.certificates import make_ca
from coterie.strategies.errors import FederationError
from coterie.system.files import append_line, make_folder, write_atomically
from coterie.wire.enrolment import Bundle, Request, public_pem, write_bundle
from tests.unit.system.disk import NEED_ROOM, Disk, Killed, no_room, watched

Change = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """Something that is written.

    Attributes:
        prepare: what is there before, in an empty folder.
        change: opens what is there, and gives the change that is interrupted.
        check: that what is there is the old or the new, and that the next start works. Receives
            whether the change was completed; returns ``old`` or ``new``.
    """

    prepare: Callable[[Path], Any]
    change: Callable[[Path], Change]
    check: Callable[[Path, bool], str]


def model(value: float) -> dict[str, np.ndarray]:
    return {"w": np.full((3, 2), value, np.float32)}


def old_or_new(found: Any, old: Any, new: Any) -> str:
    assert found in (old, new)
    return "new" if found == new else "old"


# ---------------------------------------------------------------- a file, a line


def check_file(root: Path, completed: bool) -> str:
    found = (root / "a").read_bytes()
    write_atomically(root / "a", b"next")
    assert [file.name for file in root.iterdir()] == ["a"], "nothing is left behind"
    return old_or_new(found, b"old", b"new and longer")


def check_ledger(root: Path, completed: bool) -> str:
    make_folder(root / "home")
    append_line(root / "home" / "ledger.jsonl", b'"next"', synced=True)
    lines = [json.loads(line) for line in (root / "home" / "ledger.jsonl").open() if line.strip()]
    return old_or_new(lines[:-1], [], ["new"])


def append(root: Path) -> Change:
    def change() -> None:
        make_folder(root / "home")
        append_line(root / "home" / "ledger.jsonl", b'"new"', synced=True)

    return change


# ---------------------------------------------------------------- a silo's folder


def bundle_of(root: Path, address: str) -> str:
    """What the operator at this address would send the silo."""
    home = Home(root / "home")
    make_ca(root / address, address)
    ca = (root / address / "ca.pem").read_bytes()
    return write_bundle(Bundle("a", home.fingerprint(), f"{address}:9092", ca))


def make_silo(root: Path) -> None:
    folder.create(root / "home", "a")
    (root / "key").write_text(Home(root / "home").fingerprint())
    for address in ("first", "second"):
        (root / f"{address}.bundle").write_text(bundle_of(root, address))


def make_joined_silo(root: Path) -> None:
    make_silo(root)
    join(root, "first")()


def join(root: Path, address: str) -> Change:
    text = (root / f"{address}.bundle").read_text()
    return lambda: Home(root / "home").join(text)


def coordinator_of(home: Home, root: Path) -> str:
    """Which coordinator a silo would go to; its certificate is that one's, or none is known."""
    try:
        address, ca = home.coordinator()
    except SettingsError:
        return ""
    name = address.partition(":")[0]
    assert ca.read_bytes() == (root / name / "ca.pem").read_bytes()
    return name


def check_new_silo(root: Path, completed: bool) -> str:
    is_new = (root / "home" / "key.pem").exists()
    home = folder.create(root / "home", "a")
    assert home.settings().name == "a" and home.request()
    return "new" if is_new else "old"


def check_joined(old: str, new: str) -> Callable[[Path, bool], str]:
    def check(root: Path, completed: bool) -> str:
        home = Home(root / "home")
        found = old_or_new(coordinator_of(home, root), old, new)
        join(root, new)()
        assert coordinator_of(home, root) == new
        return found

    return check


def check_new_key(root: Path, completed: bool) -> str:
    home = folder.create(root / "home", "a")
    is_new = home.fingerprint() != (root / "key").read_text()
    assert not (is_new and coordinator_of(home, root)), "a new key has not joined"
    home.join(bundle_of(root, "second"))
    assert coordinator_of(home, root) == "second"
    return "new" if is_new else "old"


def settings_of(root: Path) -> SiloSettings:
    return SiloSettings("a", home=str(root / "home"))


def keep(root: Path, number: int) -> Change:
    return lambda: rounds.keep(settings_of(root), "personal", model(number), run="r", number=number)


def check_personal(root: Path, completed: bool) -> str:
    rounds._memory.clear()  # as after a restart
    found = rounds.latest(settings_of(root), "personal", run="r", before=7)
    assert found is not None
    keep(root, 7)()
    rounds._memory.clear()
    after = rounds.latest(settings_of(root), "personal", run="r", before=8)
    assert after is not None and after["w"][0, 0] == 7
    return old_or_new(found["w"][0, 0], 5.0, 6.0)


# ---------------------------------------------------------------- the operator's folder


def request(name: str) -> Request:
    return Request(name, public_pem(ec.generate_private_key(ec.SECP384R1()).public_key()))


def names(root: Path) -> list[str]:
    return [entry.name for entry in enrolled.read(root / "roster.json") if not entry.removed]


def check_roster(old: list[str], new: list[str]) -> Callable[[Path, bool], str]:
    def check(root: Path, completed: bool) -> str:
        found = names(root)
        enrolled.enrol(root / "roster.json", request("next"))
        assert names(root) == sorted([*found, "next"])
        return old_or_new(found, old, new)

    return check


def make_federation(root: Path) -> federation.Federation:
    return federation.create(root / "study", ["localhost"])


def check_federation(root: Path, completed: bool) -> str:
    try:
        made = federation.load(root / "study")
        found = "new"
    except FederationError:
        made = federation.create(root / "study", ["localhost"])
        found = "old"
    made.renew_certificate()  # what every start of the SuperLink does
    context = ssl.create_default_context(cafile=made.ca)
    context.load_cert_chain(made.tls / "server.pem", made.tls / "server.key")
    assert (root / "study").stat().st_mode & 0o077 == 0
    return found


def check_renewed(root: Path, completed: bool) -> str:
    before = (root / "study" / "tls" / "server.pem").read_bytes()
    reason = federation.load(root / "study").renew_certificate()
    assert reason in ("", "the old one belonged to another key") and not (completed and reason)
    check_federation(root, completed)
    return "new" if before != (root / "before.pem").read_bytes() else "old"


def make_certified(root: Path) -> None:
    make_federation(root)
    shutil.copy(root / "study" / "tls" / "server.pem", root / "before.pem")


# ---------------------------------------------------------------- a run's folder


def save(root: Path, *numbers: int) -> None:
    for number in numbers:
        Checkpoints(root / "checkpoints").save(number, model(number))


def check_checkpoints(root: Path, completed: bool) -> str:
    checkpoints = Checkpoints(root / "checkpoints")
    found = checkpoints.load()
    assert found is not None and not checkpoints.damaged
    number, value = found
    assert (value["w"] == number).all()
    save(root, 5)
    assert len(list((root / "checkpoints").iterdir())) == 3
    return old_or_new(number, 3, 4)


def still(number: int) -> dict[str, Any]:
    """What a round keeps of the ones before: less in round 4, so that it is written elsewhere."""
    kept = {str(n): model(100 + n) for n in range(4 if number < 4 else 1)}
    return {**kept, "of the round": model(number)}


def save_changes(root: Path, *numbers: int) -> None:
    checkpoints = Checkpoints(root / "checkpoints")
    checkpoints.load()
    for number in numbers:
        checkpoints.save(number, still(number))


def check_changes(root: Path, completed: bool) -> str:
    at = check_whole(root)
    save_changes(root, 5)
    assert check_whole(root) == 5
    return old_or_new(at, 3, 4)


def check_whole(root: Path) -> int:
    checkpoints = Checkpoints(root / "checkpoints")
    found = checkpoints.load()
    assert found is not None and not checkpoints.damaged
    for name, kept in still(found[0]).items():
        assert (found[1][name]["w"] == kept["w"]).all()
    return found[0]


CONFIG = RunConfig.read({"strategy": "fedavg"}).plain()


def begin(root: Path) -> Recorder:
    return Recorder(root / "run", CONFIG, run_id=1)


def finish(root: Path) -> Change:
    record = begin(root)
    return lambda: record.finish({"a": model(1), "b": model(2)})


def check_record(root: Path, completed: bool) -> str:
    record = read_whole(root / "run")
    if record.status == "completed":
        for name in ("a", "b"):
            content = (root / "run" / "models" / f"{name}.safetensors").read_bytes()
            assert wire.model_hash(load(content)) == record.model_hashes[name]
        return "new"
    assert record.status == "starting"
    earlier = read_unfinished(root / "run")
    again = Recorder(root / "run", CONFIG, run_id=2, earlier=earlier, after=0)
    again.finish({"a": model(1)})
    assert read_whole(root / "run").status == "completed"
    return "old"


def check_audit(root: Path, completed: bool) -> str:
    made = federation.load(root / "study")
    log = audit.verify(made)
    unsigned = ["line 2 is not in audit.head" in finding for finding in log.findings]
    assert all(unsigned) and not (completed and unsigned), "a crash looks like a line by hand"
    audit.note(made, "next")
    after = audit.verify(made)
    assert after.findings == [] and after.acts[-1].act == "next"
    return old_or_new([act.act for act in log.acts], ["init"], ["init", "enrol"])


def announce(root: Path) -> None:
    settings = SiloSettings("a", home=str(root / "home"), policy=Policy(approve="ask"))
    approvals.not_now(settings, wire.DESCRIBE, {wire.OF_RUN: "run-1", wire.ROUNDS: 3}, "1")


def check_approval(root: Path, completed: bool) -> str:
    known = approvals.find(root / "home", "run-1")
    assert known is not None and known.terms == {wire.ROUNDS: 3}
    approvals.decide(root / "home", "run-1", "refused")
    return old_or_new(known.state, "waits", "approved")


def announce_two(root: Path) -> None:
    announce(root)
    settings = SiloSettings("a", home=str(root / "home"), policy=Policy(approve="ask"))
    approvals.not_now(settings, wire.DESCRIBE, {wire.OF_RUN: "run-2"}, "2")
    approvals.decide(root / "home", "run-1", "approved")


def check_settled(root: Path, completed: bool) -> str:
    """What was decided on is noted, what was not leaves nothing; the next look does both."""
    before = {one.run: bool(one.over) for one in approvals.read_all(root / "home")}
    approvals.settle(root / "home", lambda _: True)
    assert [(one.run, bool(one.over)) for one in approvals.read_all(root / "home")] == [
        ("run-1", True)
    ]
    assert before.items() >= {"run-1": True}.items() or not completed
    return "new" if before == {"run-1": True} else "old"


def survey(*names: str) -> Survey:
    return Survey("heart", {}, dict.fromkeys(names, "it does not share them"), {})


def check_statistics(root: Path, completed: bool) -> str:
    return old_or_new(sorted(read_survey(root).silent), ["a"], ["a", "b"])


CASES = {
    "statistics": Case(
        lambda root: write_survey(root, survey("a")),
        lambda root: lambda: write_survey(root, survey("a", "b")),
        check_statistics,
    ),
    "approvals of runs that are over": Case(
        announce_two,
        lambda root: lambda: approvals.settle(root / "home", lambda _: True),
        check_settled,
    ),
    "a file": Case(
        lambda root: write_atomically(root / "a", b"old"),
        lambda root: lambda: write_atomically(root / "a", b"new and longer"),
        check_file,
    ),
    "the ledger": Case(lambda root: None, append, check_ledger),
    "a new silo": Case(
        lambda root: None, lambda root: lambda: folder.create(root / "home", "a"), check_new_silo
    ),
    "joining": Case(make_silo, lambda root: join(root, "first"), check_joined("", "first")),
    "joining another federation": Case(
        make_joined_silo, lambda root: join(root, "second"), check_joined("first", "second")
    ),
    "a new key": Case(make_joined_silo, lambda root: Home(root / "home").new_key, check_new_key),
    "personal layers": Case(
        lambda root: keep(root, 5)(), lambda root: keep(root, 6), check_personal
    ),
    "enrolling": Case(
        lambda root: enrolled.enrol(root / "roster.json", request("a")),
        lambda root: lambda: enrolled.enrol(root / "roster.json", request("b")),
        check_roster(["a"], ["a", "b"]),
    ),
    "removing": Case(
        lambda root: enrolled.enrol(root / "roster.json", request("a")),
        lambda root: lambda: enrolled.remove(root / "roster.json", "a"),
        check_roster(["a"], []),
    ),
    "a new federation": Case(
        lambda root: None, lambda root: lambda: make_federation(root), check_federation
    ),
    "a renewed certificate": Case(
        make_certified,
        lambda root: lambda: federation.load(root / "study").renew_certificate(always=True),
        check_renewed,
    ),
    "a checkpoint": Case(
        lambda root: save(root, 1, 2, 3), lambda root: lambda: save(root, 4), check_checkpoints
    ),
    "a checkpoint of what changed": Case(
        lambda root: save_changes(root, 1, 2, 3),
        lambda root: lambda: save_changes(root, 4),
        check_changes,
    ),
    "a record": Case(lambda root: None, finish, check_record),
    "an act of an operator": Case(
        lambda root: audit.note(make_federation(root), "init"),
        lambda root: partial(audit.note, federation.load(root / "study"), "enrol", silo="b"),
        check_audit,
    ),
    "an approval": Case(
        lambda root: announce(root),
        lambda root: lambda: approvals.decide(root / "home", "run-1", "approved"),
        check_approval,
    ),
}


def assert_secrets_are_private(root: Path) -> None:
    for file in root.rglob("*"):
        if file.is_file() and b"PRIVATE" in file.read_bytes():
            assert file.stat().st_mode & 0o077 == 0, file


def copies(case: Case, root: Path) -> Iterator[Path]:
    """The prepared folder, as often as it is wanted."""
    prepared = root / "prepared"
    prepared.mkdir()
    case.prepare(prepared)
    number = 0
    while True:
        yield Path(shutil.copytree(prepared, root / str(number)))
        number += 1


@pytest.mark.parametrize("name", CASES)
def test_a_kill_or_power_cut_leaves_the_old_or_the_new(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    seen = []
    for number, root in enumerate(copies(case, tmp_path)):
        change = case.change(root)
        completed = True
        with closing(Disk(root)) as disk:
            with watched(disk, stop_before=number):
                try:
                    change()
                except Killed:
                    completed = False
            cut = [
                disk.after_power_cut(tmp_path / f"{number}-{now}", names_of_now=now)
                for now in (False, True)
            ]
        found = []
        for left in (root, *cut):
            assert_secrets_are_private(left)
            found.append(case.check(left, completed))
            assert_secrets_are_private(left)
        seen.append(found[0])
        if completed:
            assert found == ["new"] * 3, "what was completed outlasts a power cut"
            break
    assert number >= 5 and seen == sorted(seen, reverse=True) and seen[0] == "old"


@pytest.mark.parametrize("name", CASES)
def test_a_disk_that_is_full_at_any_write_leaves_the_old_or_the_new(
    name: str, tmp_path: Path
) -> None:
    case = CASES[name]
    for number, root in enumerate(copies(case, tmp_path)):
        change = case.change(root)
        completed = True
        with (
            closing(Disk(root)) as disk,
            watched(disk, stop_before=number, die=no_room, only=NEED_ROOM),
        ):
            try:
                change()
            except Exception as error:
                assert "No space left" in str(error) or isinstance(error, FederationError), error
                completed = False
        found = case.check(root, completed)
        assert_secrets_are_private(root)
        if completed and found == "new":
            break
    assert number >= 1


def real_kills(root: Path) -> None:
    """The same with real kills of a child. For a process without threads, which may fork."""
    assert threading.active_count() == 1
    for place, name in enumerate(("a new silo", "joining another federation", "a checkpoint")):
        case = CASES[name]
        (root / str(place)).mkdir()
        for number, copy in enumerate(copies(case, root / str(place))):
            change = case.change(copy)
            child = os.fork()
            if child == 0:
                with watched(
                    Disk(copy), stop_before=number, die=lambda: os.kill(os.getpid(), signal.SIGKILL)
                ):
                    change()
                os._exit(0)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert status in (0, -signal.SIGKILL)
            assert_secrets_are_private(copy)
            found = case.check(copy, status == 0)
            if status == 0:
                assert found == "new"
                break
        print(name, number)


def test_real_kills_leave_the_old_or_the_new_as_well(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; "
    code += "from tests.unit.system import test_crash_safety as t; "
    done = subprocess.run(
        [sys.executable, "-c", code + "t.real_kills(Path(sys.argv[1]))", str(tmp_path)],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    kills = [int(line.rpartition(" ")[2]) for line in done.stdout.splitlines()]
    assert len(kills) == 3 and min(kills) >= 5
