"""A silo behind a network that fails: what it has finished arrives, and counts."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from coterie.server.machine.local import LocalFederation
from tests.contract.hostile.proxy import Proxy
from tests.e2e.gated import ONE_BATCH, Gate
from tests.e2e.runs import KEYS, record_of, spec

pytestmark = pytest.mark.timeout(300)


class Behind:
    """In the place of a SuperLink: where it is reached."""

    def __init__(self, proxy: Proxy) -> None:
        self.fleet_address = proxy.address


def cut(proxy: Proxy, federation: LocalFederation, go_on: Callable[[], None]) -> None:
    proxy.cut()
    go_on()
    time.sleep(30)
    proxy.mend()


def no_backend(proxy: Proxy, federation: LocalFederation, go_on: Callable[[], None]) -> None:
    proxy.close_all()
    go_on()
    time.sleep(25)
    proxy.mend()


def half_open(proxy: Proxy, federation: LocalFederation, go_on: Callable[[], None]) -> None:
    proxy.forget()
    go_on()


def stop(pid: int, go_on: Callable[[], None]) -> None:
    os.kill(pid, signal.SIGSTOP)
    go_on()
    time.sleep(40)
    os.kill(pid, signal.SIGCONT)


def stopped_silo(proxy: Proxy, federation: LocalFederation, go_on: Callable[[], None]) -> None:
    stop(federation.processes["c"].pid, go_on)


def stopped_superlink(proxy: Proxy, federation: LocalFederation, go_on: Callable[[], None]) -> None:
    stop(federation.superlink.program.process.pid, go_on)


@pytest.mark.parametrize("fault", [cut, no_backend, half_open, stopped_silo, stopped_superlink])
def test_a_fault_while_it_trains_costs_a_silo_no_round(
    fault: Callable[..., None], federation: LocalFederation
) -> None:
    gate = Gate(federation.folder / "gate")
    federation.superlink.wait()
    proxy = Proxy(federation.superlink.fleet_address)
    try:
        for index, name in enumerate(("a", "b")):
            federation.start_silo(spec(name, index), environment=gate.environment)
        whole: Any = federation.superlink
        federation.superlink = Behind(proxy)  # type: ignore[assignment]
        federation.start_silo(spec("c", 2), environment=gate.environment)
        federation.superlink = whole
        federation.wait_for_silos(3)
        gate.close()
        keys = {**KEYS, "rounds": 3, **ONE_BATCH, "strategy": "fedavg", "round-timeout": 150.0}
        run_id, folder = federation.submit(**keys)
        gate.hold(3, rounds=1)
        fault(proxy, federation, gate.open)
        assert federation.follow(run_id, folder, lambda event: None).status == "completed"
        rounds = record_of(folder)["rounds"]
        assert [entry["left-out"] for entry in rounds] == [{}, {}, {}]
        assert [sorted(entry["silos"]) for entry in rounds] == [["a", "b", "c"]] * 3
    finally:
        gate.open()
        proxy.close()
