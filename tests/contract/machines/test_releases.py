"""A release talks with the one before it: recorded conversations, other protocols, the command."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message

from coterie import wire
from coterie.client.home import folder as homes
from coterie.engine.inprocess import InProcessGrid
from coterie.server.site import enrolled, federation
from coterie.server.study.silos import client_app
from coterie.strategies.errors import FederationError
from coterie.strategies.rounds.admission import own_release
from coterie.strategies.rounds.roster import DescribedRoster
from coterie.system.files import locked
from coterie.wire import enrolment, releases
from tests.commands import coterie
from tests.contract.machines.recorded import (
    HERE,
    SILOS,
    RecordingGrid,
    ReplayingGrid,
    message_of,
    play,
    read,
    recordings,
)

TOLERANCE = 1e-4
"""Of arrays that another release of PyTorch may round otherwise."""


def spoken() -> list[Path]:
    """Recordings of releases that this one must talk with."""
    found = [
        file for file in recordings() if releases.talk(read(file)[0]["release"], own_release())
    ]
    assert found, f"no conversation of this release or the one before is kept in {HERE}"
    return found


@pytest.mark.parametrize("file", spoken(), ids=lambda file: file.name)
def test_a_coordinator_reads_what_silos_of_the_release_before_answer(
    file: Path, tmp_path: Path
) -> None:
    """The recorded answers make the recorded models, bit for bit."""
    recording, said = read(file)
    grid = ReplayingGrid(said, SILOS)
    record = play(grid, tmp_path)
    assert record["status"] == "completed" and sorted(record["silos"]) == ["a", "b", "c"]
    assert record["model-hashes"] == recording["hashes"]
    assert {facts["release"] for facts in record["silos"].values()} == {recording["release"]}


@pytest.mark.parametrize("file", spoken(), ids=lambda file: file.name)
def test_a_silo_answers_what_a_coordinator_of_the_release_before_asks(file: Path) -> None:
    """As the silos of that release did, up to rounding."""
    _, said = read(file)
    grid = InProcessGrid(client_app(), SILOS)
    kinds = set()
    for one in said:
        asked, then = message_of(*one.asked), message_of(*one.answered)
        message = Message(asked.content, one.node, one.kind, group_id=asked.metadata.group_id)
        (reply,) = grid.send_and_receive([message])
        assert not reply.has_error(), reply.error.reason
        assert reply.content.keys() == then.content.keys()
        for name in then.content.array_records:
            for ours, theirs in zip(arrays(reply, name), arrays(then, name), strict=True):
                np.testing.assert_allclose(ours, theirs, atol=TOLERANCE)
        kinds.add(one.kind)
    assert kinds >= {wire.DESCRIBE, wire.INITIAL, wire.TRAIN, wire.EVALUATE}


def arrays(message: Message, name: str) -> list[np.ndarray]:
    model = wire.decode_arrays(message.content.array_records[name])
    return [model[key] for key in sorted(model)]


@contextmanager
def speaking(oldest: int, newest: int) -> Iterator[None]:
    """A release that speaks these protocols."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(releases, "OLDEST_PROTOCOL", oldest)
        patch.setattr(releases, "PROTOCOL", newest)
        yield


def silos_of(oldest: int, newest: int, seen: list[Any]) -> Callable[[Message, Context], Message]:
    """The silo's app in a release that speaks these protocols; notes in which it was spoken to."""
    app = client_app()

    def answer(message: Message, context: Context) -> Message:
        seen.append((message.metadata.message_type, message.content["config"].get("protocol")))
        with speaking(oldest, newest):
            return app(message, context)

    return answer


@pytest.mark.parametrize(
    ("coordinator", "silo", "agreed"),
    [((1, 2), (1, 1), 1), ((1, 1), (1, 2), 1), ((1, 2), (1, 2), 2), ((2, 3), (1, 2), 2)],
    ids=["the coordinator is ahead", "the silo is ahead", "both are new", "both have a past"],
)
def test_neighbours_agree_on_the_newest_protocol_that_both_speak(
    tmp_path: Path, coordinator: tuple[int, int], silo: tuple[int, int], agreed: int
) -> None:
    """A whole run, in which every message but the first is in that protocol."""
    seen: list[Any] = []
    grid = RecordingGrid(silos_of(*silo, seen), SILOS)
    with speaking(*coordinator):
        record = play(grid, tmp_path)
    assert record["status"] == "completed"
    spoken = {protocol for kind, protocol in seen if kind in (wire.TRAIN, wire.INITIAL)}
    assert spoken == {agreed}


def test_protocols_that_have_nothing_in_common_are_refused_on_both_sides() -> None:
    seen: list[Any] = []
    grid = InProcessGrid(silos_of(1, 1, seen), SILOS[:1])
    with (
        speaking(2, 3),
        pytest.raises(FederationError, match="speaks protocol 1 to 1, the run speaks 2"),
    ):
        DescribedRoster(task="digits", deadline_s=0.1).present(grid, number=1)
    described = wire.Description("a", 3, "digits", "s", protocol=4)
    roster = DescribedRoster(task="digits")
    assert "it speaks protocol 4, the run speaks 1 to 1" in roster._objection(described)


@pytest.mark.parametrize("odd", ["1", 1.0, True, 0, -1, 2**70])
def test_a_protocol_that_is_none_is_not_spoken(odd: object) -> None:
    assert not wire.is_spoken(odd)


def test_an_offer_that_makes_no_sense_is_answered_in_what_was_asked() -> None:
    for newest in ("2", 0, None):
        assert wire.agreed({wire.PROTOCOL_KEY: 1, wire.NEWEST_PROTOCOL: newest}) == 1
    assert wire.agreed({}) == wire.PROTOCOL


@pytest.mark.parametrize(
    ("one", "other", "do"),
    [
        ("0.1.0", "0.1.9", True), ("0.1.0", "0.2.0", True), ("0.2.0", "0.1.7", True),
        ("0.1.0", "0.3.0", False), ("1.0.0", "0.9.0", False), ("1.4.0", "1.5.0rc1", True),
        ("", "0.1.0", True), ("unknown", "0.1.0", True), ("99999999.1", "0.1.0", True),
    ],
)  # fmt: skip
def test_releases_talk_with_their_neighbours(one: str, other: str, do: bool) -> None:
    assert releases.talk(one, other) is releases.talk(other, one) is do


@pytest.fixture
def study(tmp_path: Path) -> federation.Federation:
    """Three enrolled silos; two were in a run."""
    made = federation.create(tmp_path / "study", ["127.0.0.1:9092"])
    for name in ("a", "b", "c"):
        home = homes.create(tmp_path / name, name)
        enrolled.enrol(made.roster, enrolment.read_request(home.request()))
    record(made, "hcct-1", "2026-10-01T08:00:00+00:00", {"a": "0.0.4", "b": own_release()})
    record(made, "hcct-2", "2026-11-01T08:00:00+00:00", {"a": own_release()})
    return made


def record(made: federation.Federation, name: str, started: str, silos: dict[str, str]) -> None:
    folder = made.runs / name
    folder.mkdir()
    facts = {
        n: {"num-examples": 5, "alpha": None, "node-id": "1", "release": r}
        for n, r in silos.items()
    }
    entry = {"format": 1, "run-id": "1", "status": "completed", "started": started, "config": {},
            "versions": {}, "silos": facts, "refused": {}, "rounds": []}  # fmt: skip
    (folder / "run.json").write_text(json.dumps(entry))


def check(made: federation.Federation, *arguments: str) -> tuple[int, str]:
    done = coterie("federation", "upgrade-check", "--federation", str(made.folder), *arguments)
    assert done.stderr == ""
    return done.returncode, done.stdout


def next_release(steps: int) -> str:
    major, minor = releases.numbers(own_release()) or (0, 0)
    return f"{major}.{minor + steps}.0"


def test_the_command_says_who_has_what_since_when_and_that_the_next_release_is_safe(
    study: federation.Federation,
) -> None:
    status, said = check(study, "--to", next_release(1))
    rows = {row.split()[0]: row.split()[1:] for row in said.splitlines()[1:4]}
    assert rows["a"] == [own_release(), "2026-11-01", "yes"], "the newest run counts"
    assert rows["b"] == [own_release(), "2026-10-01", "yes"]
    assert rows["c"] == ["–", "–", "not", "known"]
    assert status == 0 and "Safe now" in said and "Unknown: c." in said


def test_the_command_refuses_two_steps_at_once_and_names_silos_that_are_behind(
    study: federation.Federation,
) -> None:
    status, said = check(study, "--to", next_release(2))
    assert status == 1 and "are not consecutive." in said
    assert f"silo a has {own_release()}, which does not work" in said and "Safe now" not in said


def test_the_command_says_not_now_while_a_run_goes_on(study: federation.Federation) -> None:
    with locked(study.runs / "hcct-2"):
        status, said = check(study)
    assert status == 1 and "run hcct-2 is active." in said
    assert check(study)[0] == 0


def test_what_is_no_release_is_refused(study: federation.Federation) -> None:
    done = coterie("federation", "upgrade-check", "--to", "next", "--federation", str(study.folder))
    assert done.returncode == 2 and "not a release of coterie." in done.stderr


def test_a_damaged_record_is_passed_over(study: federation.Federation) -> None:
    (study.runs / "hcct-2/run.json").write_text("{")
    status, said = check(study)
    assert "a " in said and status in (0, 1)
