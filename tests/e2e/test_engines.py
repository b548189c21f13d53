"""The newest Flower that installs beside 1.34: the same models, the same tests, and both at once.

It is installed in a folder of its own, which is first on the path of what is to have it. Where it
cannot be installed these tests are left out.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from coterie.server.machine.link import control
from coterie.strategies.errors import FederationError
from tests.e2e.gated import ONE_BATCH, TASK
from tests.e2e.organisations import NAMES, SETTINGS, Organisations
from tests.e2e.runs import ROOT, coterie_process, finished, in_process, until

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

RELEASES = "flwr>=1.40,<1.43"
"""As ``coterie.server.machine.superlink`` knows them."""
WITH_IT = (
    "tests/client/test_link.py",
    "tests/client/test_sharing.py",
    "tests/hostile",
    "tests/server/test_allowance.py",
    "tests/server/test_serving.py",
    "tests/test_bundles.py",
    "tests/e2e/test_organisations.py",
    "tests/e2e/test_operators.py",
    "tests/e2e/test_faults.py",
    "tests/e2e/test_hostile.py",
    "tests/e2e/test_runs.py",
)
"""Tests of every part that touches Flower: kills, resumption, TLS, enrolment, operators."""
KEYS = {"task": TASK, "min-silos": 2, "seed": 7, "strategy": "fedavg", "rounds": 4, **ONE_BATCH}
RUN = ("fedavg", "--rounds", "4", "--min-silos", "2", "--seed", "7", "--task", TASK, *SETTINGS)
LIKE_BEFORE = """
import runpy
import coterie.client.resident.sharing as sharing
sharing.speaks_http = lambda *_: False
runpy.run_module("coterie.client", run_name="__main__")
"""
"""A silo that speaks gRPC alone."""
MODELS = """
import json, sys
from pathlib import Path
from coterie.server.machine.local import LocalFederation
from tests.e2e.runs import HCCT, KEYS, NAMES, hashes_of, spec
with LocalFederation(Path(sys.argv[1])) as federation:
    for index, name in enumerate(NAMES):
        federation.start_silo(spec(name, index))
    federation.wait_for_silos(len(NAMES))
    runs = [federation.run(**keys)[0] for keys in ({**KEYS, "strategy": "fedavg"}, HCCT)]
print(json.dumps([hashes_of(run) for run in runs]))
"""

Newest = Callable[[], AbstractContextManager[None]]


@pytest.fixture(scope="module")
def newest(tmp_path_factory: pytest.TempPathFactory) -> Newest:
    """What is started in this context has the newest release."""
    folder = tmp_path_factory.mktemp("newest") / "flower"
    line = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
    installed = subprocess.run(
        [*line, RELEASES, "click<8.4"], capture_output=True, text=True, timeout=600
    )
    if installed.returncode:
        pytest.skip(f"{RELEASES} cannot be installed here: {installed.stderr.strip()[-300:]}")

    @contextmanager
    def used() -> Iterator[None]:
        before = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), before or str(ROOT)])
        try:
            yield
        finally:
            os.environ["PYTHONPATH"] = before

    with used():
        assert flower()[:2] == (1, 4), "a newer one than 1.34"
    assert flower()[:2] == (1, 3)
    return used


def flower() -> tuple[int, int]:
    """The first number, and the first digit of the second, of what a process gets."""
    code = "from importlib.metadata import version; print(version('flwr'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    major, minor = done.stdout.split(".")[:2]
    return int(major), int(minor[0])


def models(folder: Path) -> list[dict[str, str]]:
    """Hashes of the models of FedAvg and of HCCT, over the wire."""
    done = subprocess.run(
        [sys.executable, "-c", MODELS, str(folder)],
        cwd=ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: list[dict[str, str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_models_are_the_same_with_either_bit_for_bit(newest: Newest, tmp_path: Path) -> None:
    with newest():
        by_newest = models(tmp_path / "newest")
    assert by_newest == models(tmp_path / "default")
    assert len(by_newest) == 2 and by_newest[0] != by_newest[1]


def test_what_touches_flower_passes_its_tests_with_the_newest(newest: Newest) -> None:
    with newest():
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
             "-m", "not nightly", *WITH_IT],
            cwd=ROOT, capture_output=True, text=True, timeout=1700,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout[-10_000:]


def test_a_coordinator_is_upgraded_and_no_silo_has_to_be(newest: Newest, tmp_path: Path) -> None:
    """Silos with either release at a coordinator with the one, then the other."""
    models = in_process(tmp_path / "run", *NAMES, **KEYS)["model-hashes"]
    with Organisations(tmp_path / "study", call=coterie_process) as study:
        study.start_superlink()
        study.add("a", 0)
        with newest():
            study.add("b", 1)
        study.wait_for(2)
        assert finished(study.submit(*RUN)) == models

        assert study.end("superlink") == 0
        study.log_of("superlink").unlink()
        with newest():
            study.start_superlink()
        study.wait_for(2)
        assert all(study.processes[name].poll() is None for name in NAMES), "they stayed"
        assert finished(study.submit(*RUN)) == models

        study.end("a", signal.SIGKILL)
        home = ("start", "--home", str(study.home_of("a")))
        study.start_program("a", sys.executable, "-c", LIKE_BEFORE, *home)
        until(lambda: study.said("a").count("connected") > 1, "a over gRPC", deadline_s=150)
        study.wait_for(2)
        assert finished(study.submit(*RUN)) == models
        made = study.federation
        with (
            control(made.control_address, root_certificates=made.ca) as nobody,
            pytest.raises(FederationError, match="asks operators for their key"),
        ):
            nobody.runs()
