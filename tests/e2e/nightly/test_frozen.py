"""Processes that stop without ending, as under a debugger, in a paused machine; clocks that jump.

``COTERIE_FROZEN=10,40,130`` says for how many seconds, 10 by default; 600 is worth a
night. What was found is printed (``-s``), and appended to the file that ``COTERIE_FOUND`` names.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from coterie.system.files import held_by
from tests.e2e.crashes import KEYS, assert_same_outcome, resume
from tests.e2e.gated import ONE_BATCH, TASK
from tests.e2e.organisations import SETTINGS, Organisations
from tests.e2e.runs import finished, found, record_of, until
from tests.e2e.trio import Trio

SECONDS = [int(text) for text in os.environ.get("COTERIE_FROZEN", "10").split(",")]
UNNOTICED_S = 40
"""So long nothing may be lost. A silo that is silent for longer may miss rounds."""

pytestmark = pytest.mark.timeout(300 + 3 * max(SECONDS))


def process(trio: Trio, folder: Path, what: str) -> int:
    executor = trio.superlink.executor
    assert executor is not None
    pids = {
        "silo": trio.processes["c"].pid,
        "SuperLink": trio.superlink.program.process.pid,
        "ServerApp": held_by(folder),
        "executor": executor.process.pid,
    }
    pid = pids[what]
    assert isinstance(pid, int)
    return pid


@pytest.mark.parametrize("seconds", SECONDS)
@pytest.mark.parametrize("what", ["silo", "SuperLink", "ServerApp", "executor"])
def test_a_process_that_stops_for_a_while_costs_no_committed_round(
    what: str, seconds: int, trio: Trio
) -> None:
    keys = {**KEYS, **ONE_BATCH, "rounds": 5, "round-timeout": 60.0 + seconds}
    undisturbed, _ = trio.run(**keys)
    trio.gate.close()
    _, folder = trio.submit(**keys)
    trio.gate.hold(3, rounds=1)
    began, pid = time.monotonic(), process(trio, folder, what)
    os.kill(pid, signal.SIGSTOP)
    try:
        trio.gate.open()
        time.sleep(seconds)
        before = len(list((folder / "checkpoints").glob("round-*.safetensors")))
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: held_by(folder) is None, "the end of the run", deadline_s=150.0 + seconds)
    resumed = record_of(folder)["status"] != "completed"
    if resumed:
        resume(trio, folder)
        assert record_of(folder)["resumed"][0]["after-round"] >= before, "a round was lost"
    record = record_of(folder)
    assert [entry["round"] for entry in record["rounds"]] == [1, 2, 3, 4, 5]
    assert all(entry["silos"] for entry in record["rounds"]), "a round without anybody counts"
    left_out = [name for entry in record["rounds"] for name in entry["left-out"]]
    found(what=what, frozen=seconds, resumed=resumed, missed=len(left_out),
          seconds=round(time.monotonic() - began, 1))  # fmt: skip
    if seconds <= UNNOTICED_S:
        assert not resumed and not left_out
        assert_same_outcome(folder, undisturbed)
    else:
        assert set(left_out) <= {"a", "b", "c"}


JUMPING = """
import runpy
from datetime import timedelta
from pathlib import Path
import flwr.client.grpc_rere_client.node_auth_client_interceptor as inside
right = inside.now
inside.now = lambda: right() + timedelta(seconds=float(Path({file!r}).read_text()))
runpy.run_module("coterie.client", run_name="__main__")
"""


@pytest.mark.parametrize("jump", [60, -400])
def test_a_clock_that_jumps_and_is_set_right_costs_its_silo_no_round(
    jump: int, pair: Organisations, tmp_path: Path
) -> None:
    offset = tmp_path / "offset"
    offset.write_text("0")
    assert pair.end("b") == 0
    code = JUMPING.format(file=str(offset))
    home = ("--home", str(pair.home_of("b")))
    pair.start_program("b", sys.executable, "-c", code, "serve", *home)
    pair.wait_for(2)
    pair.gate.close()
    keys = ("fedavg", *SETTINGS, "--set", "rounds=3", "--set", "min-silos=2")
    folder = pair.submit(*keys, "--set", f"task={TASK}", "--set", "round-timeout=120")
    pair.gate.hold(2, rounds=1)
    offset.write_text(str(jump))
    pair.gate.open()
    time.sleep(15)
    offset.write_text("0")
    finished(folder)
    assert [entry["left-out"] for entry in record_of(folder)["rounds"]] == [{}, {}, {}]
    assert pair.end("b") == 0
