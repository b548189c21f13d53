"""Many silos in one process: what the command line asks for, one reading, one model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coterie.client.home.folder import locked_all
from coterie.client.home.policy import Policy
from coterie.client.home.settings import SiloSettings
from coterie.client.resident.virtual import settings_of
from coterie.client.work.session import open_session, open_sessions, session_of
from coterie.engine.inprocess import InProcessGrid
from coterie.server.study.given import of_file
from tests.conftest import silo


def common(*, label_counts: bool = False, **changes: Any) -> SiloSettings:
    return SiloSettings("any", device="cpu", policy=Policy(label_counts=label_counts), **changes)


def silos(count: int = 3) -> list[SiloSettings]:
    options = {"split": "iid", "split-seed": 2}
    return settings_of(common(options=options), f"0-{count - 1}/9")


def test_sessions_of_one_process_share_the_model_and_have_their_own_data() -> None:
    sessions = open_sessions(silos())
    assert len({id(session.model) for session in sessions}) == 1
    assert len({session.schema for session in sessions}) == 1
    for session in sessions:
        alone = open_session(session.settings)
        assert session.data.train.x.equal(alone.data.train.x)
        assert session.data.test.y.equal(alone.data.test.y)
    assert not sessions[0].data.train.x.equal(sessions[1].data.train.x)


def test_each_silo_has_a_home_of_its_own(tmp_path: Path) -> None:
    own = settings_of(common(home=str(tmp_path), options={"split": "iid"}), "3/9")
    assert own[0].name == "silo-3" and own[0].home == str(tmp_path / "silo-3")


def test_a_folder_of_a_silo_that_runs_is_refused_before_anything_is_joined(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with locked_all([str(tmp_path / "a"), str(tmp_path / "silo-3"), ""]):
        several = ["--set", "split=iid", "--home", str(tmp_path)]
        for asked in (
            ["--name", "b", "--home", str(tmp_path / "a")],
            ["--partitions", "3/9", *several],
            ["--partitions", "2-3/9", *several],
        ):
            assert silo(["serve", *asked, "--retry-for", "0.1"]) == 2
            assert "a silo is already running from" in capsys.readouterr().err
    with locked_all([str(tmp_path / "a"), str(tmp_path / "silo-3")]):
        pass  # they are free again


def test_a_home_in_which_nothing_can_be_kept_is_refused_before_anything_is_joined(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "held" / "lock").mkdir(parents=True)  # cannot be opened
    for home, said in (("file", "is a file"), ("file/b", "Not a directory"),
                       ("held", "a silo cannot save its models in")):  # fmt: skip
        assert (
            silo(["serve", "--name", "b", "--retry-for", "0.1", "--home", str(tmp_path / home)])
            == 2
        )
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("shares", [False, True])
def test_silos_of_a_simulation_share_label_counts_only_by_its_file_or_the_command_line(
    shares: bool, tmp_path: Path
) -> None:
    file = tmp_path / "two.toml"
    file.write_text(f"silos = 2\nlabel-counts = {str(shares).lower()}\n")
    for asked, expected in (
        ((common(label_counts=shares), "0-1/2"), shares),
        ((common(), "", file), shares),
        ((common(label_counts=True), "", file), True),
    ):
        assert {silo.policy.label_counts for silo in settings_of(*asked)} == {expected}
    own = of_file(file).specs[0].node_config()
    assert SiloSettings.from_node_config(own, node_id=0).policy.label_counts is shares


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["--partitions", "0/2", "--name", "a"], "--name applies to one silo"),
        (["--simulation", "x.toml", "--set", "train=3"], "options in the simulation file"),
    ],
)
def test_what_does_not_go_together_is_refused(
    line: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert silo(["serve", *line]) == 2
    assert said in capsys.readouterr().err


def test_silos_prepared_by_node_config_are_not_loaded_again() -> None:
    from flwr.app import Context, RecordDict

    from coterie.client.app import app
    from coterie.client.prepare import prepare_nodes

    nodes = [one.to_node_config() for one in silos(2)]
    prepare_nodes(nodes)
    assert InProcessGrid(app, nodes)
    contexts = [Context(1, i, dict(own), RecordDict(), {}) for i, own in enumerate(nodes)]
    first, second = (session_of(context) for context in contexts)
    assert first.model is second.model
