"""Former names of keys and settings work for one release, with a warning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord

from coterie import wire
from coterie.client.home.folder import Home, create
from coterie.client.home.policy import Policy
from coterie.client.home.settings import SiloSettings
from coterie.server.cli.keys import keys_of
from coterie.server.runs.config import RunConfig, all_keys, defaults, train_config
from coterie.server.runs.record import Run
from coterie.server.site import federation
from coterie.server.study.comparison_file import read
from coterie.strategies import FedGroup
from coterie.strategies.rounds.result import RunResult
from coterie.system import former_names
from coterie.tasks import load_task
from coterie.tasks.simulation import Simulation

FEDGROUP: dict[str, Any] = {"strategy": "fedgroup", "pretrain-epochs": 3, "leading-metric": "loss"}


@pytest.fixture(autouse=True)
def _warned_of_nothing() -> None:
    former_names.warn.cache_clear()


def warnings(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return sorted(capsys.readouterr().err.splitlines())


def warned(*former: str, names: Any = former_names.RUN_KEYS) -> list[str]:
    return sorted(f"warning: `{one}` is now `{names[one]}`." for one in former)


def test_every_name_of_today_exists_and_no_former_one_does() -> None:
    keys = all_keys().keys()
    assert set(former_names.RUN_KEYS.values()) <= keys
    assert not former_names.RUN_KEYS.keys() & keys


def test_todays_name_counts_and_one_warning_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        found = former_names.of_today({"a": 1, "b": 2, "c": 3}, {"a": "b", "c": "d", "x": "y"})
        assert found == {"b": 2, "d": 3}
    assert warnings(capsys) == warned("a", "c", names={"a": "b", "c": "d"})
    former_names.of_today({"a": 1}, {"a": "e"}, quiet=True)
    assert not warnings(capsys)


def test_a_run_takes_them_and_its_messages_keep_the_names_of_the_wire(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = RunConfig.read(FEDGROUP)
    assert warnings(capsys) == warned("pretrain-epochs", "leading-metric")
    assert (config.plain()["cold-start-epochs"], config.primary_metric) == (3, "loss")
    sent = train_config(config, run="r") | dict(config.algorithm.entries({}))
    assert sent["leading-metric"] == "loss"
    assert wire.key_of("pretrain-steps") == "cold-start-steps"
    assert wire.sent_as("primary-metric") == "leading-metric"


def test_a_bundle_of_the_release_before_has_every_key_and_is_taken(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It states the defaults of other strategies as well, which nobody typed."""
    was = {now: former for former, now in former_names.RUN_KEYS.items()}
    bundle = {was.get(key, key): value for key, value in defaults().items()}
    config = RunConfig.read_from_flower({**bundle, "strategy": "fedavg", "alone": "local-1"})
    assert config.baseline_run == "local-1"
    assert warnings(capsys) == warned("alone")


def test_local_is_another_name_of_independent(tmp_path: Path) -> None:
    assert RunConfig.read({"strategy": "local"}).strategy == "independent"
    assert RunConfig.read_from_flower({"strategy": "local"}).strategy == "independent"
    node = {"name": "a", "strategies": "local,hcct"}
    policy = SiloSettings.from_node_config(node, node_id=1).policy
    assert policy.strategies == ("independent", "hcct")
    file = tmp_path / "compare.toml"
    text = 'seeds = [0]\nsilos = 2\n[split]\nkind = "iid"\n[run]\nrounds = 1\n'
    file.write_text(text + '[[strategies]]\nstrategy = "local"\n')
    assert list(read(file).runs) == ["local"], "no second baseline is added"


def test_a_command_line_and_files_take_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert keys_of(["alone=12", "leading-metric=auroc"]) == {
        "baseline-run": "12", "primary-metric": "auroc"
    }  # fmt: skip
    assert warnings(capsys) == warned("alone", "leading-metric")
    file = tmp_path / "simulation.toml"
    text = 'silos = 2\n[split]\nkind = "dirichlet"\nalpha = 0.5\n[run]\npretrain-silos = 4\n'
    file.write_text(text)
    simulation = Simulation.read(file)
    assert simulation.run == {"cold-start-silos": 4}
    assert simulation.split == {"kind": "dirichlet", "dirichlet-alpha": 0.5}
    both = {**former_names.RUN_KEYS, **former_names.SPLIT}
    assert warnings(capsys) == warned("alpha", "pretrain-silos", names=both)


def test_an_option_of_a_task_takes_them(capsys: pytest.CaptureFixture[str]) -> None:
    task, options = load_task("digits"), {"split": "dirichlet", "silos": 3}
    now = task.load_all({**options, "split-dirichlet-alpha": 0.3}, [0, 1, 2])
    former = task.load_all({**options, "split-alpha": 0.3}, [0, 1, 2])
    assert [len(one.y_train) for one in former] == [len(one.y_train) for one in now]
    assert warnings(capsys) == warned("split-alpha", names=former_names.OPTIONS)


def test_a_silos_settings_take_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = create(tmp_path / "silo", "a").folder
    file = folder / "silo.toml"
    text = file.read_text().replace('metrics_address = ""', 'metrics = "9465"')
    file.write_text(text.replace("[policy]", '[policy]\nmetrics = ["error"]'))
    home = Home(folder)
    assert home.settings().policy == Policy(share_metrics=("error",))
    assert home.process.metrics_address.endswith(":9465")
    node = SiloSettings.from_node_config({"name": "a", "metrics": "loss"}, node_id=1)
    assert node.policy.share_metrics == ("loss",)
    names = ("share_metrics", "metrics_address", "share-metrics")
    assert warnings(capsys) == sorted(f"warning: `metrics` is now `{name}`." for name in names)


def test_a_coordinators_settings_take_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = federation.create(tmp_path / "study", ["127.0.0.1"]).folder
    file = folder / "coterie.toml"
    file.write_text(file.read_text().replace('metrics_address = ""', 'metrics = "9464"'))
    found = federation.load(folder).config.monitoring.metrics_address
    assert found.endswith(":9464")
    assert warnings(capsys) == ["warning: `metrics` is now `metrics_address`."]


def test_python_takes_them(capsys: pytest.CaptureFixture[str]) -> None:
    strategy = FedGroup(num_groups=2, pretrain_epochs=3, train_config={"primary-metric": "loss"})
    assert strategy.algorithm.plain()["cold-start-epochs"] == 3
    assert strategy.train_config["leading-metric"] == "loss"
    assert RunResult(ArrayRecord()).common is None
    assert warnings(capsys) == [
        "warning: `pretrain_epochs` is now `cold_start_epochs`.",
        "warning: `result.common` is now `result.global_model`.",
    ]


def test_a_record_is_read_under_todays_names_without_a_warning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = Run(config={"strategy": "fedgroup", "leading-metric": "loss", "alone": ""})
    assert run.config == {"strategy": "fedgroup", "primary-metric": "loss", "baseline-run": ""}
    assert not warnings(capsys)
