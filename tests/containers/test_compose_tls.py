"""The overlay docker/tls.yaml on a real Docker engine: keys, enrolment, a newcomer, a removal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.containers.compose import (
    Federation,
    docker,
    newcomer_joins_and_models_are_the_simulations,
    until,
    up,
)

pytestmark = pytest.mark.timeout(4500)


@pytest.fixture(scope="module")
def federation() -> Iterator[Federation]:
    with up("compose.yaml", "docker/tls.yaml", records="superlink:/federation/runs") as own:
        yield own


def operator(federation: Federation, *arguments: str) -> str:
    """A command of the operator, in the coordinator's container."""
    return docker("exec", federation.container("superlink"), "coterie", *arguments)


def test_enrolled_silos_and_a_newcomer_get_the_models_of_the_simulation(
    federation: Federation, tmp_path: Path
) -> None:
    newcomer_joins_and_models_are_the_simulations(federation, tmp_path)
    assert operator(federation, "members", "list").count("online") == 7


def test_private_keys_are_where_they_were_made_and_nowhere_else(federation: Federation) -> None:
    find = "import pathlib; print([str(p) for p in pathlib.Path('/').glob('*/*/key.pem')])"
    for service in ("superlink", "operator", "run"):
        if federation.state(service)["Running"]:
            assert federation.inside(service, find).stdout.strip() == "[]"
    assert federation.inside("silo-1", find).stdout.strip() == "['/silo/silo-1/key.pem']"


def test_a_silo_cannot_read_what_another_exchanges(federation: Federation) -> None:
    seen = federation.inside("silo-2", "import os; print(sorted(os.listdir('/exchange')))").stdout
    assert seen.strip() == "['join', 'request']"
    claimed = federation.inside("silo-2", "print(open('/exchange/join').read())").stdout
    assert claimed != federation.inside("silo-1", "print(open('/exchange/join').read())").stdout


def test_a_restarted_silo_needs_nobody_to_let_it_in_again(federation: Federation) -> None:
    before = federation.log("silo-5").count("is connected")
    docker("restart", federation.container("silo-5"))
    until(
        lambda: federation.log("silo-5").count("is connected") > before,
        "silo-5 to be connected again",
        120,
        federation,
    )


def test_a_removed_silo_is_refused_and_says_so(federation: Federation) -> None:
    operator(federation, "members", "remove", "silo-3", "--yes")
    until(
        lambda: "refuses this silo's key" in federation.log("silo-3"),
        "silo-3 to be refused",
        120,
        federation,
    )
    roster = operator(federation, "members", "list")
    assert roster.count("removed") == 1 and roster.count("online") == 6
