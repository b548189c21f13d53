"""Flower's own apps with our strategies, on resident silos and on stock SuperNodes.

Every run has the groups, models and metrics of the same app in one process
(``tests/contract/test_flower_apps.py``).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from coterie.client.home.policy import Policy
from coterie.client.resident.foreign import may_leave
from coterie.server.machine.link import Control, control
from coterie.server.machine.local import LocalFederation
from coterie.server.study.result import Result
from tests.apps import examples
from tests.apps.examples import CASES, PYTORCH, SILOS, SKLEARN, XGBOOST, Example, check, partition
from tests.e2e.runs import supernode
from tests.e2e.test_foreign_app import ENVIRONMENT, programs, start_app
from tests.kit import until

pytestmark = [examples.needs_apps, pytest.mark.timeout(3600)]
TABLES = [case for case in CASES if case[0] is not PYTORCH]
PICTURES = [case for case in CASES if case[0] is PYTORCH]
FEW = [(SKLEARN, "hcct"), (XGBOOST, "pergroup")]


def path_with(*folders: Path) -> str:
    """``PYTHONPATH`` with more folders."""
    return os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])


@pytest.fixture
def superlink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalFederation]:
    """A SuperLink whose ServerApps find the data; they leave their files here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", path_with(examples.STANDIN))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with LocalFederation(tmp_path / "federation") as local:
        local.superlink.wait()
        yield local


def play(
    calls: Control,
    federation: LocalFederation,
    cases: Sequence[tuple[Example, str]],
    *,
    leaves: Callable[[str], bool] = bool,
) -> None:
    """Run apps in a federation, and each in one process."""
    groups, patch = examples.BY_HAND, pytest.MonkeyPatch()
    for example, strategy in cases:
        run_id = start_app(
            calls, example.manifest(strategy), example.files(strategy, groups=groups)
        )
        what = f"the run of {example.name} with {strategy}"
        until(lambda: calls.runs(run_id)[0].ended, what, deadline_s=1800)  # noqa: B023
        (folder,) = (federation.folder / "superlink" / "runs").glob(f"*-{run_id}")
        result = Result(folder)
        check(result, example, strategy)
        own = federation.folder / f"{example.name}-{strategy}"
        order = [partition(result, name) for name in sorted(result.run.silos)]
        here = examples.in_process(example, strategy, own, patch, partitions=order, groups=groups)
        assert result.groups == here.groups
        assert result.run.model_hashes == here.run.model_hashes
        assert result.metric_rows == [
            {key: value for key, value in row.items() if leaves(key)} for row in here.metric_rows
        ]
        groups = result.groups if strategy == "hcct" else groups


@pytest.mark.nightly
@pytest.mark.parametrize("cases", [FEW, CASES], ids=["few", "all"])
def test_on_resident_silos(
    cases: list[tuple[Example, str]], superlink: LocalFederation, tmp_path: Path
) -> None:
    address = superlink.superlink.fleet_address
    with control(superlink.superlink.control_address) as calls:
        for example in dict.fromkeys(example for example, _ in cases):
            own = tmp_path / example.name
            example.write(own, "pergroup", groups=[])
            app = example.manifest("")["tool"]["flwr"]["app"]["components"]["clientapp"]
            line = [sys.executable, "-m", "coterie.client", "serve", "--app", app]
            line += ["--partitions", f"0-{SILOS - 1}/{SILOS}", "--superlink", address]
            env = {**ENVIRONMENT, "PYTHONPATH": path_with(own)}
            with programs([*line, "--home", str(own / "homes")], env=env):
                until(lambda: calls.num_online() == SILOS, "the silos", deadline_s=120)
                own_cases = [case for case in cases if case[0] is example]
                play(calls, superlink, own_cases, leaves=partial(may_leave, policy=Policy()))
            until(lambda: calls.num_online() == 0, "the silos to be gone", deadline_s=120)


@pytest.mark.nightly
@pytest.mark.parametrize("cases", [TABLES, PICTURES], ids=["tables", "pictures"])
def test_on_stock_supernodes(cases: list[tuple[Example, str]], superlink: LocalFederation) -> None:
    """A SuperNode starts a process for each message: that is slow. Trees get HCCT's groups."""
    settings = [f"partition-id={number} num-partitions={SILOS}" for number in range(SILOS)]
    lines = [supernode(superlink, own) for own in settings]
    with (
        control(superlink.superlink.control_address) as calls,
        programs(*lines, env={**ENVIRONMENT, "PYTHONPATH": path_with()}),
    ):
        until(lambda: calls.num_online() == SILOS, "the SuperNodes", deadline_s=120)
        play(calls, superlink, cases)
