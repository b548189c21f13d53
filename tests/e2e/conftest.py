"""Real processes: a SuperLink, silos, gRPC. Everything is ended when the tests are over.

Starting a federation takes seconds, so the tests of a worker share two: ``trio`` without TLS,
``pair`` of organisations with TLS and enrolment. What a test killed or added is mended before the
next one. Both end with the tests of this folder: idle, each takes a tenth of a core.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from coterie.server.machine.local import LocalFederation
from tests.e2e.organisations import NAMES, Organisations, processes_of
from tests.e2e.trio import Trio
from tests.e2e.warm import Silo


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Everything in this folder is an e2e test; tests of one federation go to one worker."""
    here = str(Path(__file__).parent)
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.e2e)
            for shared in {"resident_trio", "resident_pair"} & set(item.fixturenames):
                item.add_marker(pytest.mark.xdist_group(shared))


@pytest.fixture(scope="session", autouse=True)
def warm_silos() -> Iterator[None]:
    """Silos of a ``LocalFederation`` start as forks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coterie.server.machine.local.Program", Silo)
        yield


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[LocalFederation]:
    """A separate SuperLink; the test starts the silos."""
    with LocalFederation(tmp_path / "federation") as local:
        yield local


@pytest.fixture(scope="package")
def resident_trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    """Of the worker."""
    with Trio(tmp_path_factory.mktemp("resident") / "trio") as local:
        yield local


@pytest.fixture
def trio(resident_trio: Trio) -> Trio:
    """A SuperLink and the silos a, b, c, ready."""
    resident_trio.mend()
    return resident_trio


@pytest.fixture(scope="package")
def resident_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Organisations]:
    """Of the worker. Made by the commands that people type, one silo before the SuperLink runs."""
    folder = tmp_path_factory.mktemp("resident") / "pair"
    with Organisations(folder) as made:
        made.add("a", 0)
        made.start_superlink()
        made.add("b", 1)
        yield made
        for name in NAMES:
            assert made.processes[name].poll() is not None or made.end(name) == 0
        superlink = made.processes["superlink"]
        assert made.end("superlink") == 0
        assert not processes_of(superlink, "site.gate")


@pytest.fixture
def pair(resident_pair: Organisations) -> Organisations:
    """A coordinator with TLS and the enrolled silos a and b, ready."""
    resident_pair.mend()
    return resident_pair
