"""A campaign of random kills: one in every check, 60 with ``make chaos`` (COTERIE_CHAOS says).

Silos, the ServerApp and the SuperLink are killed with SIGKILL at random moments of one run, again
and again. At the end every silo's model is bit for bit that of a run that nobody disturbed.

A campaign is made of runs of 20 kills. Where ``COTERIE_FOUND`` names a file, each that is over is
noted there, and a campaign that was interrupted goes on with the others.
"""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

import pytest

from coterie.system.files import held_by
from tests.e2e.crashes import KEYS, assert_same_outcome, kill_server_app, restart_superlink
from tests.e2e.runs import NAMES, found, in_process, record_of, until
from tests.e2e.trio import Trio

MANY = int(os.environ.get("COTERIE_CHAOS", "60"))
SEED = int(os.environ.get("COTERIE_CHAOS_SEED", "0"))
PORTION = 20
"""Kills of one run: it has four times as many rounds, and eight."""
PORTIONS = [(i, min(PORTION, MANY - i)) for i in range(0, MANY, PORTION)]
KINDS = ("server-app", "superlink", "everything")
LIKELY = ("server-app", "server-app", "server-app", "superlink", "superlink", "everything")


def checkpoints(folder: Path) -> int:
    """The last committed round."""
    found = sorted((folder / "checkpoints").glob("round-*.safetensors"))
    return int(found[-1].stem.removeprefix("round-")) if found else 0


def strike(trio: Trio, folder: Path, kind: str, dice: random.Random) -> None:
    """Kill, and bring back what a machine's service manager would."""
    if kind == "server-app":
        kill_server_app(folder)
        return
    if kind == "everything":  # the coordinator's machine and a silo's lose their power
        name = dice.choice(NAMES)
        kill_server_app(folder)
        trio.kill(name)
        trio.kill_superlink()
        trio.add(name, NAMES.index(name))
    else:
        trio.kill_superlink()
    restart_superlink(trio, folder)


def is_noted(**campaign: int) -> bool:
    """Whether this part of a campaign is over already, by its notes."""
    notes = Path(os.environ.get("COTERIE_FOUND", ""))
    lines = notes.read_text("utf-8").splitlines() if notes.is_file() else []
    return any(campaign.items() <= json.loads(line).items() for line in lines)


@pytest.mark.nightly
def test_a_kill_changes_nothing_of_the_outcome(trio: Trio, tmp_path: Path) -> None:
    strike_often(trio, 1, random.Random(SEED), tmp_path / "run")


@pytest.mark.nightly
@pytest.mark.timeout(120 + 45 * PORTION)
@pytest.mark.parametrize(("first", "kills"), PORTIONS)
def test_no_kill_of_many_changes_the_outcome(
    trio: Trio, first: int, kills: int, tmp_path: Path
) -> None:
    campaign = {"first": first, "kills": kills, "seed": SEED}
    if is_noted(**campaign):
        pytest.skip("it is noted that this part is over")
    began = time.monotonic()
    struck = strike_often(trio, kills, random.Random(SEED + first), tmp_path / "run")
    found(**campaign, struck=struck, seconds=round(time.monotonic() - began))


def strike_often(trio: Trio, kills: int, dice: random.Random, undisturbed: Path) -> dict[str, int]:
    """A run that is struck so often, beside one in this process; how often by what."""
    rounds = 4 * kills + 8  # so many that none is over before its only kill
    keys = {**KEYS, "rounds": rounds, "local-epochs": 5}
    in_process(undisturbed, **keys)
    _, folder = trio.submit(**keys)
    struck: dict[str, int] = {}
    kept = 0
    for number in range(kills):
        target = checkpoints(folder) + dice.randint(1, 3)  # a random moment of a later round
        deadline = time.monotonic() + 90
        while checkpoints(folder) < min(target, rounds - 1):
            assert time.monotonic() < deadline, f"waited for round {target}"
            time.sleep(0.02)
        time.sleep(dice.uniform(0, 0.3))
        if held_by(folder) is None:
            break  # it was over before
        kept = checkpoints(folder)
        kind = KINDS[number] if kills < len(KINDS) else dice.choice(LIKELY)
        strike(trio, folder, kind, dice)
        struck[kind] = struck.get(kind, 0) + 1
        assert checkpoints(folder) >= kept, "a committed round is lost"
        go_on(trio, folder)
        assert record_of(folder)["resumed"][-1]["after-round"] >= kept
    while record_of(folder)["status"] != "completed":
        assert record_of(folder)["status"] in ("starting", "running"), record_of(folder)
        time.sleep(0.2)
    assert sum(struck.values()) == kills
    assert_same_outcome(folder, undisturbed)
    return struck


def go_on(trio: Trio, folder: Path) -> None:
    """``coterie run resume --detach``, and wait until the run stands where it stood."""
    times = len(record_of(folder).get("resumed", []))
    assert "interrupted" in trio.records("runs").stdout
    done = trio.operator("run", "--resume", folder.name, "--detach")
    assert done.returncode == 0, done.stdout + done.stderr
    until(
        lambda: len(record_of(folder).get("resumed", [])) > times,
        "the resumed run to begin",
        deadline_s=90,
    )
