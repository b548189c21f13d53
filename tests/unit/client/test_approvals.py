"""Runs wait until a person at the silo approves them; what is approved is what was announced."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from datetime import datetime
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict

from coterie import wire
from coterie.client.cli.approve_page import make_server, page
from coterie.client.home import approvals, hours
from coterie.client.home.approvals import ApprovalError, decide, find, read_all
from coterie.client.home.folder import Home, create
from coterie.client.home.policy import Policy
from coterie.client.home.settings import SettingsError, SiloSettings
from coterie.client.resident.foreign import ForeignApp
from coterie.server.runs.record import read_run
from coterie.strategies import FederationError
from coterie.strategies import strategy as rounds
from coterie.strategies.rounds import roster as rosters
from coterie.system.commandline import MisuseError
from tests.commands import coterie as command
from tests.conftest import digits_config, plain_app
from tests.kit import Tap, ask, initial, run, train

TERMS: dict[str, Any] = {"strategy": "hcct", "rounds": 3, "task": "digits", "of-run": "hcct-7"}
WORK: dict[str, Any] = {"strategy": "hcct", "rounds": 3, "task": "digits", "run": "hcct-7"}


@pytest.fixture
def silo(tmp_path: Path) -> dict[str, Any]:
    return digits_config("a", approve="ask", home=str(create(tmp_path / "a", "a").folder))


def home_of(silo: dict[str, Any]) -> Path:
    return Path(silo["home"])


def code_of(reply: Message) -> int:
    return reply.error.code if reply.has_error() else 0


def test_a_run_waits_until_it_is_approved_and_then_works(silo: dict[str, Any]) -> None:
    waits = ask(wire.DESCRIBE, silo, **TERMS)
    assert code_of(waits) == wire.UNAPPROVED
    assert "silo 'a' waits for an approver: `coterie silo pending` there lists run hcct-7" in str(
        waits.error.reason
    )
    assert code_of(train(initial(), silo, **WORK)) == wire.UNAPPROVED, "whatever is asked"
    assert not ask(wire.INITIAL, silo, seed=0).has_error(), "in that there is nothing of the silo's"
    decide(home_of(silo), "hcct-7", "approved")
    assert not ask(wire.DESCRIBE, silo, **TERMS).has_error()
    assert not ask(wire.DESCRIBE, silo, **TERMS, **{wire.ASKED_BY: "bea"}).has_error(), "resumed"
    assert not ask(
        wire.DESCRIBE, silo, **TERMS, **{wire.BUNDLES: True}, hosted=False
    ).has_error(), "travel"
    assert not train(initial(), silo, **WORK).has_error()
    decide(home_of(silo), "hcct-7", "refused")
    assert code_of(train(initial(), silo, **WORK)) == wire.REFUSED


def test_of_a_run_of_statistics_a_person_is_shown_that_it_takes_numbers_and_no_update() -> None:
    policy = Policy(statistics=("inputs",), statistics_from=12)
    counts, itself = approvals.leaving({"strategy": "statistics"}, policy)
    assert "interval or category of inputs, no number below 12" in counts and "name" in itself


@pytest.mark.parametrize(
    ("terms", "said"),
    [
        ({"strategy": "evaluation", "parent": "r\x1b[2J"}, "metrics of the models of r\\x1b[2J on"),
        ({"strategy": "trees"}, "by column and bin, over no fewer than 12, which the coordinator"),
        ({"strategy": "trees", "secure": True}, "12, seen only added to other silos'"),
        ({"strategy": "auto"}, "update in each round, or for boosted trees sums over its rows"),
        ({"strategy": "auto", "secure": True}, "sketches of its updates"),
    ],
)
def test_of_a_run_that_takes_no_plain_updates_a_person_is_shown_what_leaves(
    terms: dict[str, Any], said: str
) -> None:
    first, *_ = approvals.leaving(terms, Policy(sums=("trees",), statistics_from=12))
    assert said in first


def test_a_run_that_announces_something_else_waits_again(silo: dict[str, Any]) -> None:
    ask(wire.DESCRIBE, silo, **TERMS)
    code = decide(home_of(silo), "hcct-7", "approved").code
    changed = {wire.SCHEMA: "x", wire.SCHEMA_PARTS: "{}"}
    again = ask(wire.DESCRIBE, silo, **TERMS, **changed)
    assert "does not fit the run" in str(again.error.reason), "that is no other run"
    assert code_of(ask(wire.DESCRIBE, silo, **{**TERMS, "local-epochs": 9})) == wire.UNAPPROVED
    assert code_of(train(initial(), silo, **WORK)) == wire.UNAPPROVED
    with pytest.raises(ApprovalError, match="changed its settings since: its code is"):
        decide(home_of(silo), "hcct-7", "approved", code=code)
    known = find(home_of(silo), "hcct-7")
    assert known is not None and known.terms["local-epochs"] == 9


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"strategy": "fedavg"}, "approved this run with strategy = 'hcct'"),
        ({"personal": ""}, "approved this run with personal = 'head'"),
        ({"task.dropout": 0.9}, "approved this run with task.dropout = ''"),
        (
            {"secure": False},
            "approved a secure run, and this message asks for a plain update, or plain sums.",
        ),
        ({"server-round": 4}, "approved 3 rounds, and this message is for round 4"),
    ],
)
def test_work_that_was_not_announced_is_refused(change: dict[str, Any], said: str) -> None:
    terms = {**TERMS, "personal": "head", "secure": True}
    work = {**WORK, "personal": "head", "secure": True, "server-round": 1}
    assert not approvals._difference(wire.TRAIN, work, terms)
    assert said in approvals._difference(wire.TRAIN, {**work, **change}, terms)
    without = {key: value for key, value in work.items() if key not in change}
    if "task.dropout" not in change and "server-round" not in change:
        assert approvals._difference(wire.TRAIN, without, terms), "leaving it out is no way round"


def test_label_counts_that_were_not_announced_stay() -> None:
    said = approvals._difference(wire.LABEL_COUNTS, WORK, TERMS)
    assert said == "approved a run without label counts, and this message asks for them."
    assert not approvals._difference(wire.LABEL_COUNTS, WORK, {**TERMS, "label-counts": True})


def test_a_coordinator_neither_fills_the_disk_nor_hides_what_it_asks(
    silo: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(approvals, "MAX_WAITING", 2)
    for name in ("one", "../../two"):
        assert code_of(ask(wire.DESCRIBE, silo, **{**TERMS, "of-run": name})) == wire.UNAPPROVED
    many = ask(wire.DESCRIBE, silo, **{**TERMS, "of-run": "three"})
    assert code_of(many) == wire.REFUSED and "2 runs that wait" in str(many.error.reason)
    for name in ("\x1b[2Jrun", "x" * 300):
        unseen = ask(wire.DESCRIBE, silo, **{**TERMS, "of-run": name})
        assert "cannot show them this run's name" in str(unseen.error.reason)
    odd = ask(wire.DESCRIBE, silo, **{**TERMS, "note": "x" * 2000})
    assert "note is not a number or a short text" in str(odd.error.reason)
    assert sorted(one.run for one in read_all(home_of(silo))) == ["../../two", "one"]
    files = {path.name for path in (home_of(silo) / "approvals").iterdir()}
    assert len(files) == 3 and not (home_of(silo).parent / "two").exists()


def test_a_person_sees_lists_approves_and_refuses(silo: dict[str, Any]) -> None:
    home = home_of(silo)
    toml = home / "silo.toml"
    toml.write_text(toml.read_text().replace('approve = ""', 'approve = "ask"'))
    ask(wire.DESCRIBE, silo, **{**TERMS, "asked-by": "ada", "label\x1b[2J": 1})
    shown = command("silo", "pending", "--home", str(home)).stdout
    known = find(home, "hcct-7")
    assert known is not None
    for part in (
        f"Run hcct-7, code {known.code}",
        "by ada, says a coordinator that this silo has not joined",
        "strategy: hcct",
        "rounds: 3",
        "label\\x1b[2J = 1",
        "its update in each round, which the coordinator sees",
        f"coterie silo approve hcct-7 --code {known.code}",
        "1 run waits for approval.",
    ):
        assert part in shown
    done = command("silo", "approve", "hcct-7", "--code", known.code, "--home", str(home))
    assert done.returncode == 0 and "Run hcct-7 is approved." in done.stdout
    assert not ask(
        wire.DESCRIBE, silo, **{**TERMS, "asked-by": "ada", "label\x1b[2J": 1}
    ).has_error()
    wrong = command("silo", "approve", "other", "--home", str(home))
    assert wrong.returncode == 2 and "no run 'other' is known here" in wrong.stderr
    command("silo", "reject", "hcct-7", "--home", str(home))
    assert "refused" in command("silo", "pending", "--home", str(home)).stdout


def test_a_run_that_is_over_leaves_the_list(silo: dict[str, Any]) -> None:
    """As the silo's process finds by asking the SuperLink; a run that is resumed is back."""
    home = home_of(silo)
    for name in ("on", "never", "done", "back"):
        ask(wire.DESCRIBE, silo, **{**TERMS, "of-run": name})
    for number, one in enumerate(sorted(read_all(home), key=lambda one: one.run), start=1):
        approvals._write(home, replace(one, flower_run=str(number)))
    for name in ("done", "back"):
        decide(home, name, "approved")
    over = {find(home, name).flower_run for name in ("never", "done", "back")}  # type: ignore[union-attr]
    approvals.settle(home, over.__contains__)
    assert find(home, "never") is None, "it leaves nothing"
    shown = command("silo", "pending", "--home", str(home)).stdout
    assert "1 run waits for approval." in shown and "Run on, code" in shown
    assert "2 runs are over, the last" in shown and "never" not in shown
    text = page(Home(home))
    assert "1 run waits" in text and "2 runs are over, the last" in text
    with pytest.raises(
        ApprovalError, match=r"run done has ended\. If it is resumed, it must be approved again"
    ):
        decide(home, "done", "approved")
    assert not ask(wire.DESCRIBE, silo, **{**TERMS, "of-run": "back"}).has_error(), "approved"
    again = find(home, "back")
    assert again is not None and not again.over
    assert "back  approved" in command("silo", "pending", "--home", str(home)).stdout


def test_runs_that_are_over_make_room_for_others(
    silo: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(approvals, "MAX_WAITING", 1)
    ask(wire.DESCRIBE, silo, **{**TERMS, "of-run": "one"})
    known = find(home_of(silo), "one")
    assert known is not None
    approvals._write(home_of(silo), replace(known, flower_run="7"))
    assert code_of(ask(wire.DESCRIBE, silo, **{**TERMS, "of-run": "two"})) == wire.REFUSED
    approvals.settle(home_of(silo), lambda run: run == "7")
    assert code_of(ask(wire.DESCRIBE, silo, **{**TERMS, "of-run": "two"})) == wire.UNAPPROVED


def test_a_person_decides_on_the_silos_own_page(silo: dict[str, Any]) -> None:
    home = Home(home_of(silo))
    ask(wire.DESCRIBE, silo, **{**TERMS, "label": "<script>"})
    bound = make_server(home, port=0, token="word")
    thread = threading.Thread(target=bound.serve_forever, args=(0.02,))
    thread.start()

    def asked(
        form: dict[str, str] | None = None, path: str = "/word/", **headers: str
    ) -> tuple[int, str]:
        connection = HTTPConnection("127.0.0.1", bound.server_address[1], timeout=10)
        body = None if form is None else urlencode(form)
        connection.request("GET" if form is None else "POST", path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    try:
        status, text = asked()
        assert status == 200 and "1 run waits for approval" in text and "&lt;script&gt;" in text
        found = find(home.folder, "hcct-7")
        assert found is not None and f"code {found.code}" in text
        decision = {"run": "hcct-7", "code": found.digest, "state": "approved"}
        assert asked(decision, "/")[0] == 401, "without the token"
        assert asked(decision, Host="evil.example")[0] == 421
        assert asked({**decision, "state": "waits"})[0] == 400
        assert asked({**decision, "code": ""})[0] == 400
        ask(wire.DESCRIBE, silo, **{**TERMS, "local-epochs": 9})
        assert "changed its settings since" in asked(decision)[1]
        again = find(home.folder, "hcct-7")
        assert again is not None and again.state == "waits"
        done = asked({**decision, "code": again.digest})
        assert done[0] == 200 and "Run hcct-7 is approved." in done[1]
        assert not ask(wire.DESCRIBE, silo, **{**TERMS, "local-epochs": 9}).has_error()
        with pytest.raises(MisuseError, match="cannot listen on"):
            make_server(home, port=bound.server_address[1], token="word")
    finally:
        bound.shutdown()
        thread.join()
        bound.server_close()


def test_without_a_folder_nothing_can_be_approved() -> None:
    with pytest.raises(SettingsError, match="needs a folder in which approvals are saved:"):
        SiloSettings.from_node_config({"approve": "ask"}, node_id=1)


def test_a_kill_in_the_middle_of_writing_leaves_the_decision_or_none(silo: dict[str, Any]) -> None:
    ask(wire.DESCRIBE, silo, **TERMS)
    home = home_of(silo)
    child = os.fork()
    if child == 0:  # it decides until it is killed
        while True:
            decide(home, "hcct-7", "approved")
            decide(home, "hcct-7", "refused")
    try:
        states, until = set(), time.monotonic() + 30
        while not states >= {"approved", "refused"} and time.monotonic() < until:
            known = find(home, "hcct-7")
            assert known is not None
            states.add(known.state)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert states >= {"approved", "refused"}
    assert decide(home, "hcct-7", "approved").state == "approved", "no lock is left behind"


def test_an_app_of_ones_own_waits_too(silo: dict[str, Any]) -> None:
    served = ForeignApp(plain_app())

    def asked(**config: Any) -> Message:
        message = Message(RecordDict({"config": ConfigRecord(config)}), 1, "train", group_id="1")
        message.metadata.__dict__["_message_id"] = "1"
        context = Context(9, 1, silo, RecordDict(), run_config={"lr": 0.1})
        return served(message, context)

    assert code_of(asked()) == wire.UNAPPROVED
    run = read_all(home_of(silo))[0]
    assert run.terms == {"lr": 0.1}
    decide(home_of(silo), run.run, "approved")
    assert code_of(asked()) not in wire.NOT_NOW


# ---------------------------------------------------------------- a whole run


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rosters, "ASKED_AGAIN_S", 0.0)
    monkeypatch.setattr(rosters, "MOST_LATER_S", 0.0)
    monkeypatch.setattr(rounds, "TRY_AGAIN_S", 0.0)


def play(folder: Path, silos: Any, **keys: Any) -> None:
    usual = {"rounds": 4, "min_silos": 1, "wait_for_silos": 0.3}
    run(folder, silos, run_id=9, **(usual | keys))


def test_a_run_goes_on_without_a_silo_that_waits_and_takes_it_in_once_approved(
    silo: dict[str, Any], tmp_path: Path, at_once: None
) -> None:
    other = digits_config("b", 1)
    folder = tmp_path / "run-9"

    def approve(messages: list[Message]) -> None:
        """Approve it when the second round's training is asked for."""
        kind = messages[0].metadata.message_type
        if kind == wire.TRAIN and len(grid.asked(wire.TRAIN)) == 1:
            decide(home_of(silo), "run-9", "approved")

    grid = Tap([silo, other], before=approve)
    play(folder, grid)
    record = read_run(folder)
    assert [sorted(entry.silos) for entry in record.rounds] == [["b"], ["b"], *[["a", "b"]] * 2]
    assert tuple(record.rounds[2].joined) == ("a",)


def test_a_run_that_nobody_approves_in_time_says_what_it_waited_for(
    silo: dict[str, Any], tmp_path: Path, at_once: None
) -> None:
    with pytest.raises(FederationError) as caught:
        play(tmp_path / "run-9", [silo])
    assert (
        "waiting for silos: 0 of at least 1 have joined; silo 'a' waits for an approver: "
        "`coterie silo pending` there lists run run-9. Start silos"
    ) in str(caught.value)


def test_a_run_waits_for_the_hours_of_its_silos_and_goes_on_then(
    tmp_path: Path, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([*[21] * 3, *[7] * 3])
    monkeypatch.setattr(hours, "now", lambda: datetime(2026, 11, 23, next(clock, 21)))
    silo = digits_config("a", hours="20:00-06:00")
    play(tmp_path / "run-9", [silo], wait_for_silos=20.0)  # also on a machine that is slow
    record = read_run(tmp_path / "run-9")
    assert [sorted(entry.silos) for entry in record.rounds] == [["a"]] * 4
    assert record.status == "completed"
