"""A campaign of random kills. ``COTERIE_CHAOS`` says how many; ``make chaos`` takes 60.

Silos, the ServerApp and the SuperLink are killed with SIGKILL at random moments of one run, again
and again. At the end every silo's model is bit for bit that of a run that nobody disturbed.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from coterie.server.machine.local import LocalFederation
from coterie.server.runs.record import read_whole
from coterie.system.files import held_by
from tests.e2e.conftest import coterie, record_of, spec
from tests.e2e.crashes import (
    KEYS,
    NAMES,
    assert_same_outcome,
    kill_server_app,
    kill_superlink,
    restart_superlink,
    start_silos,
)

KILLS = int(os.environ.get("COTERIE_CHAOS", "3"))
SEED = int(os.environ.get("COTERIE_CHAOS_SEED", "0"))
ROUNDS = 4 * KILLS
KINDS = ("server-app", "server-app", "server-app", "superlink", "superlink", "everything")


def checkpoints(folder: Path) -> int:
    """The last committed round."""
    found = sorted((folder / "checkpoints").glob("round-*.safetensors"))
    return int(found[-1].stem.removeprefix("round-")) if found else 0


def strike(federation: LocalFederation, folder: Path, kind: str, dice: random.Random) -> None:
    """Kill, and bring back what a machine's service manager would."""
    if kind == "server-app":
        kill_server_app(folder)
        return
    if kind == "everything":  # the coordinator's machine and a silo's lose their power
        name = dice.choice(NAMES)
        kill_server_app(folder)
        federation.end_silo(name, how=signal.SIGKILL)
        federation.processes[name].wait(10)
        kill_superlink(federation)
        federation.start_silo(spec(name, NAMES.index(name)))
    else:
        kill_superlink(federation)
    restart_superlink(federation, folder)


@pytest.mark.timeout(120 + 45 * KILLS)
def test_no_kill_changes_the_outcome(federation: LocalFederation) -> None:
    dice = random.Random(SEED)
    start_silos(federation)
    keys = {**KEYS, "rounds": ROUNDS, "local-epochs": 5}
    undisturbed, last = federation.run(**keys)
    assert last.status == "completed"
    _, folder = federation.submit(**keys)
    struck: dict[str, int] = {}
    kept = 0
    for number in range(KILLS):
        target = checkpoints(folder) + dice.randint(1, 3)  # a random moment of a later round
        deadline = time.monotonic() + 90
        while checkpoints(folder) < min(target, ROUNDS - 1):
            assert time.monotonic() < deadline, f"waited for round {target}"
            time.sleep(0.02)
        time.sleep(dice.uniform(0, 0.3))
        if held_by(folder) is None:
            break  # it was over before
        kept = checkpoints(folder)
        kind = KINDS[number % len(KINDS)] if len(KINDS) > KILLS else dice.choice(KINDS)
        if len(KINDS) > KILLS:
            kind = ("server-app", "superlink", "everything")[number % 3]
        strike(federation, folder, kind, dice)
        struck[kind] = struck.get(kind, 0) + 1
        assert checkpoints(folder) >= kept, "a committed round is lost"
        go_on(federation, folder)
        assert read_whole(folder).resumed[-1].after_round >= kept
    while record_of(folder)["status"] != "completed":
        assert record_of(folder)["status"] in ("starting", "running"), record_of(folder)
        time.sleep(0.2)
    print(f"\n{sum(struck.values())} strikes {struck}; {len(record_of(folder)['rounds'])} rounds")
    assert sum(struck.values()) == KILLS
    assert_same_outcome(folder, undisturbed)


def go_on(federation: LocalFederation, folder: Path) -> None:
    """``coterie run --resume --detach``, and wait until the run stands where it stood."""
    times = len(read_whole(folder).resumed)
    done = coterie(
        "run", "--resume", folder.name, "--runs-dir", str(federation.runs_dir), "--detach",
        "--superlink", federation.superlink.control_address,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    deadline = time.monotonic() + 90
    while len(read_whole(folder).resumed) == times:
        assert time.monotonic() < deadline, "waited for the resumed run to begin"
        time.sleep(0.05)
