"""A silo of another release than the coordinator's does not take part, and both are named."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from coterie import wire
from coterie.engine.inprocess import InProcessGrid
from coterie.strategies.errors import FederationError
from coterie.strategies.rounds.roster import DescribedRoster

OWN = version("coterie")


def describing() -> ClientApp:
    app = ClientApp()

    @app.query("describe")
    def describe(message: Message, context: Context) -> Message:
        name, release = str(context.node_config["name"]), str(context.node_config["release"])
        description = wire.Description(
            name=name, num_examples=3, task="digits", schema="s", versions={"coterie": release}
        )
        return Message(wire.encode_description(description), reply_to=message)

    return app


@pytest.mark.parametrize("release", [OWN, OWN.rpartition(".")[0] + ".99", "unknown"])
def test_the_same_release_takes_part(release: str) -> None:
    grid = InProcessGrid(describing(), [{"name": "a", "release": release}])
    (silo,) = DescribedRoster(task="digits").present(grid, number=1)
    assert silo.name == "a"


def test_another_release_is_refused_with_both_versions_named() -> None:
    grid = InProcessGrid(describing(), [{"name": "a", "release": "99.0.0"}])
    roster = DescribedRoster(task="digits", deadline_s=0.1)
    with pytest.raises(FederationError, match=r"it has coterie 99\.0\.0, the coordinator has"):
        roster.present(grid, number=1)
