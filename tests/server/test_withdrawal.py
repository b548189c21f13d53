"""A silo that withdraws: what is deleted, what stays, and a statement that says both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coterie.server.runs.config import RunConfig
from coterie.server.runs.record import read_run
from coterie.server.runs.run import execute
from coterie.server.site import audit, enrolled, withdrawal
from coterie.server.site.federation import Federation, create, load
from coterie.server.site.withdrawal import GoingOnError, finish_all, verified, withdraw
from coterie.strategies.errors import FederationError
from coterie.strategies.rounds import roster as rosters
from coterie.system import files
from coterie.system.files import locked
from tests.client.test_approvals import _Acting
from tests.commands import coterie
from tests.conftest import digits_config
from tests.server.test_federation import request
from tests.system.disk import Killed

KEYS: dict[str, Any] = {"strategy": "fedavg", "min-silos": 2, "rounds": 3, "wait-for-silos": 5}


@pytest.fixture
def made(tmp_path: Path) -> Federation:
    """A federation of a, b and c, with a run of all, one that c joined late, and one without c."""
    federation = create(tmp_path / "study", ["localhost"])
    for name in ("a", "b", "c"):
        asked = request(name)[0]
        assert coterie("enrol", asked, "--federation", str(federation.folder)).returncode == 0
    for number, (who, churn) in enumerate([("abc", ""), ("abc", "c+3"), ("ab", "")], start=1):
        nodes = [digits_config(name, "abc".index(name)) for name in who]
        config = RunConfig.read({**KEYS, "churn": churn})
        folder = federation.runs / f"fedavg-{number}"
        execute(_Acting(nodes, {}), config, run_id=number, folder=folder)
    return load(federation.folder)


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
    before = files_of(made)
    done, file = withdraw(made, "c", who="ada")
    assert before - files_of(made) == GONE
    assert {one.file for one in done.deleted} == {f"runs/{name}" for name in GONE}
    assert [(one.run, one.first, one.last, list(one.group)) for one in done.averaged] == [
        ("fedavg-1", 1, 3, ["a", "b", "c"]),
        ("fedavg-2", 3, 3, ["a", "b", "c"]),
    ]
    assert done.restart == {"fedavg-1": 0, "fedavg-2": 2}
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
    told = coterie("withdraw", "c", "--federation", folder).stdout
    assert "Deleted: 6 files that held its models or updates" in told
    assert "run fedavg-1, round 1 to 3: models of a, b, c" in told
    assert "Run fedavg-2 can be resumed after round 2, before it came" in told
    assert "Run fedavg-1 has no checkpoint from before it came" in told
    (file,) = (made.folder / "withdrawals").glob("c-*.json")
    shown = coterie("withdraw", "--verify", str(file), "--root-certificates", str(made.ca))
    assert shown.returncode == 0 and "Deleted: 6 files" in shown.stdout
    kept = json.loads(file.read_text())
    kept["statement"]["averaged"] = []
    file.write_text(json.dumps(kept))
    changed = coterie("withdraw", "--verify", str(file), "--federation", folder)
    assert changed.returncode != 0 and "its signature is not of this CA" in changed.stderr
    file.write_text("{}")
    with pytest.raises(FederationError, match="this is no statement of a withdrawal"):
        verified("{}", made.ca.read_bytes())


def test_a_run_that_goes_on_is_named_and_the_withdrawal_is_completed_later(
    made: Federation,
) -> None:
    with locked(made.runs / "fedavg-1"):
        with pytest.raises(GoingOnError) as caught:
            withdraw(made, "c")
        assert "c is shut out, but the withdrawal is not complete" in str(caught.value)
        assert f"coterie stop fedavg-1 --federation {made.folder}" in str(caught.value)
        assert {e.name for e in enrolled.read(made.roster) if e.removed} == {"c"}
    said: list[str] = []
    assert coterie("enrol", request("c")[0], "--federation", str(made.folder)).returncode == 0
    finish_all(made, said.append)
    assert "c" in {e.name for e in enrolled.read(made.roster) if not e.removed}, "with a new key"
    assert "The withdrawal of silo c is complete." in said[0]
    assert not files_of(made) & GONE
    (file,) = (made.folder / "withdrawals").glob("c-*.json")
    assert len(verified(file.read_text(), made.ca.read_bytes()).deleted) == 6


def test_who_was_never_enrolled_cannot_withdraw(made: Federation) -> None:
    for name in ("d", "../a"):
        with pytest.raises(FederationError, match="was ever enrolled"):
            withdraw(made, name)
    assert coterie("withdraw", "--federation", str(made.folder)).returncode == 2


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

    for module in (withdrawal, enrolled, audit):
        monkeypatch.setattr(module, "write_atomically", dying(files.write_atomically))
    monkeypatch.setattr(audit, "append_line", dying(files.append_line))
    monkeypatch.setattr(Path, "unlink", dying(Path.unlink))
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
