"""ClientApps of others in a resident silo: unchanged, within the silo's policy, in its ledger."""

from __future__ import annotations

import io
import json
import logging
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedMedian

from coterie import wire
from coterie.client.cli.check_app import check_app
from coterie.client.home.policy import Policy
from coterie.client.home.settings import SettingsError, SiloSettings
from coterie.client.resident.foreign import (
    ForeignApp,
    check_policy,
    conditions,
    load_app,
    load_mod,
    may_leave,
    typed,
)
from coterie.client.resident.virtual import settings_of
from coterie.engine.fast.silo import link
from coterie.engine.inprocess import InProcessGrid
from coterie.strategies import HCCT, FedAvg, PerGroup
from tests.apps import quick_numpy, quick_torch
from tests.commands import coterie
from tests.conftest import silo
from tests.kit import assert_same_models

TORCH_CONFIG = {"batch-size": 16, "local-epochs": 2}


class Resident:
    """Calls a foreign app as the resident host does: by the silo's settings, with a run's config.

    The in-process grid names nodes 1, 2, …; here each has a silo's settings.
    """

    def __init__(self, app: ClientApp, run_config: Mapping[str, Any]) -> None:
        self.app, self.run_config = ForeignApp(app), dict(run_config)

    def __call__(self, message: Message, context: Context) -> Message:
        silo = SiloSettings(f"silo-{context.node_id}", options=context.node_config)
        return self.app(
            message,
            Context(7, context.node_id, silo.to_node_config(), RecordDict(), self.run_config, 9),
        )


def supernode(app: ClientApp, run_config: Mapping[str, Any]) -> Callable[..., Message]:
    """Calls an app with what a SuperNode gives it: its node config, and its state of the run."""

    def call(message: Message, context: Context) -> Message:
        node, state = dict(context.node_config), context.state
        return app(message, Context(7, context.node_id, node, state, dict(run_config), 9))

    return call


NODES = [{"partition-id": i, "num-partitions": 4} for i in range(4)]


MEDIANS = partial(PerGroup, [["silo-0", "silo-2"], ["silo-1", "silo-3"]], lambda group: FedMedian())


@pytest.mark.parametrize("strategy", [FedAvg, HCCT, pytest.param(MEDIANS, id="PerGroup")])
@pytest.mark.parametrize(
    ("module", "run_config"),
    [(quick_numpy, {"step": 0.5}), (quick_torch, TORCH_CONFIG)],
    ids=["numpy", "pytorch"],
)
def test_the_quickstarts_give_the_models_that_they_give_under_supernodes(
    module: Any, run_config: Mapping[str, Any], strategy: Any
) -> None:
    results = []
    for app in (supernode(module.app, run_config), Resident(module.app, run_config)):
        results.append(
            strategy(train_config={"lr": 0.05}).start(
                grid=InProcessGrid(app, NODES), initial_arrays=module.initial(), num_rounds=3
            )
        )
    stock, resident = results
    assert stock.groups == resident.groups and len(resident.models) == 4
    assert_same_models(stock, resident)
    for mine, theirs in zip(resident.rounds, stock.rounds, strict=True):
        assert repr(mine.evaluation) == repr(theirs.evaluation)  # NaN is not equal to itself
        assert mine.metrics == theirs.metrics
    assert len(resident.rounds[-1].metrics) == 4
    assert not any(report.left_out for report in resident.rounds)


# ---------------------------------------------------------------- one message


def echo(**replied: Any) -> tuple[ClientApp, list[Context]]:
    """An app that sends back what it received and these metrics; and the contexts it was given."""
    app, seen = ClientApp(), []
    metrics = {"num-examples": 5, "train_loss": 0.5, "eval_acc": 0.75, "f1": 0.6, "mine": 3.0}

    @app.query()
    @app.evaluate()
    @app.train()
    def train(message: Message, context: Context) -> Message:
        seen.append(context)
        records = {"arrays": message.content["arrays"], "metrics": MetricRecord(metrics)}
        return Message(RecordDict({**records, **replied}), reply_to=message)

    return app, seen


def settings(
    home: Path | None = None, options: Mapping[str, Any] | None = None, **policy: Any
) -> SiloSettings:
    own = {"partition-id": 1, "num-partitions": 2} if options is None else options
    return SiloSettings(
        "north", options=own, home=str(home or ""), policy=Policy(**policy), alpha=None
    )


def asked(
    app: ForeignApp,
    silo: SiloSettings,
    config: Mapping[str, Any] | None = None,
    *,
    run_config: Mapping[str, Any] | None = None,
    kind: str = "train",
    series: int = 3,
) -> Message:
    """The answer to one message."""
    content = RecordDict(
        {
            "arrays": ArrayRecord({"body.w": Array(np.ones(2)), "head.w": Array(np.ones(1))}),
            "config": ConfigRecord({"server-round": 1, **(config or {})}),
        }
    )
    message = Message(content, dst_node_id=1, message_type=kind, group_id="1")
    context = Context(5, 77, silo.to_node_config(), RecordDict(), dict(run_config or {}), series)
    return app(message, context)


def test_the_app_sees_its_node_config_its_run_config_and_its_state_as_under_a_supernode() -> None:
    app, seen = echo()
    foreign = ForeignApp(app)
    options = {"partition-id": 1, "num-partitions": 2, "data-path": "/d", "x": 0.5}
    own = settings(options=options)
    asked(foreign, own, run_config={"lr": 0.1})
    seen[0].state["kept"] = ConfigRecord({"a": 1})
    asked(foreign, own)
    asked(foreign, own, series=4)
    asked(foreign, replace(own, name="south"))
    first = seen[0]
    assert first.node_config == {
        "partition-id": 1,
        "num-partitions": 2,
        "data-path": "/d",
        "x": 0.5,
    }
    assert (first.run_id, first.node_id, first.run_config) == (5, 77, {"lr": 0.1})
    assert ["kept" in context.state for context in seen] == [True, True, False, False]


def test_a_resident_silo_states_its_name_for_an_app_that_has_no_function_for_that() -> None:
    app, seen = echo()
    reply = asked(ForeignApp(app), replace(settings(), name="south"), kind=wire.NAME)
    assert dict(reply.content["config"]) == {"name": "south"} and not seen


def test_states_of_old_runs_are_forgotten() -> None:
    app, seen = echo()
    foreign = ForeignApp(app)
    asked(foreign, settings(), series=1)
    seen[0].state["kept"] = ConfigRecord({"a": 1})
    for series in (2, 3, 4, 1, 5, 6, 7, 8, 1):
        asked(foreign, settings(), series=series)
    assert ["kept" in c.state for c in seen[1:]] == [False] * 3 + [True] + [False] * 5


def test_what_leaves_is_in_the_ledger_before_it_goes(tmp_path: Path) -> None:
    app, _ = echo()
    reply = asked(ForeignApp(app), settings(tmp_path, share_metrics=("train-loss",)))
    (line,) = (tmp_path / "ledger.jsonl").read_text().splitlines()
    noted = json.loads(line)
    assert noted["values"]["metrics"] == dict(reply.content["metrics"].items())
    assert [tensor["name"] for tensor in noted["tensors"]] == ["body.w", "head.w"]
    assert (noted["type"], noted["bytes"]) == ("train", sum(t["bytes"] for t in noted["tensors"]))


@pytest.mark.parametrize("how", ["raises", "replies"])
def test_of_an_error_only_its_kind_leaves(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if how == "raises":
            raise KeyError("patient 17")
        return Message(Error(3, "patient 17"), reply_to=message)

    reply = asked(ForeignApp(app), settings(tmp_path))
    assert reply.error.code == wire.FAILED
    assert "patient" not in str(reply.error.reason) and "'north' failed: " in str(
        reply.error.reason
    )
    assert "patient" not in (tmp_path / "ledger.jsonl").read_text()
    assert "patient 17" in caplog.text, "who runs the silo can see it"


@pytest.mark.parametrize(
    ("key", "leaves"),
    [
        ("val_mae", True), ("macro_auroc", True), ("precise", True),
        ("test_f1", False), ("f1_macro", False), ("Recall", False), ("precision/2", False),
        ("eval_balanced_accuracy", False),
    ],
)  # fmt: skip
def test_metrics_that_reveal_class_frequencies_stay_under_every_name(
    key: str, leaves: bool
) -> None:
    """Precision, recall and accuracy give the share of a class exactly."""
    assert may_leave(key, Policy()) is leaves
    assert may_leave(key, Policy(share_metrics=(key,)))


@pytest.mark.parametrize(
    ("metrics", "leave"),
    [
        (None, {"num-examples", "train_loss", "eval_acc", "mine"}),  # f1 reveals how many there are
        ((), {"num-examples"}),
        (("train-loss",), {"num-examples", "train_loss"}),
        (("error", "f1"), {"num-examples", "eval_acc", "f1"}),
        (("mine", "eval_acc"), {"num-examples", "eval_acc", "mine"}),  # the app's own names
    ],
)
def test_only_the_metrics_that_the_silo_names_leave(
    metrics: Any, leave: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    app, _ = echo(more=MetricRecord({"f1": 0.2}), config=ConfigRecord({"labels": "1,2,3"}))
    resident = ForeignApp(app)
    asked(resident, settings(share_metrics=metrics))
    reply = asked(resident, settings(share_metrics=metrics))
    assert set(reply.content["metrics"]) == leave
    stay = sorted({"train_loss", "eval_acc", "f1", "mine"} - leave)
    (said,) = [text for text in caplog.messages if "stay here" in text]
    assert str(stay) in said and "share_metrics ([policy] in silo.toml)" in said, "once for all"
    assert set(reply.content["more"]) == leave & {"f1"}
    assert set(reply.content["config"]) == ({"labels"} if metrics is None else set())


@pytest.mark.parametrize(
    ("policy", "config", "run_config", "said"),
    [
        ({"strategies": ("hcct",)}, {}, {}, "one that the run does not name"),
        ({"strategies": ("hcct",)}, {"strategy": "fedavg"}, {}, "this run's strategy is fedavg"),
        ({"strategies": ("hcct",)}, {"strategy": "hcct"}, {}, ""),
        ({"max_rounds": 5}, {"server-round": 6}, {}, "at most 5 rounds"),
        ({"max_rounds": 5}, {}, {"num-server-rounds": 6}, "at most 5 rounds"),
        ({"max_rounds": 5}, {"rounds": 5}, {"num-server-rounds": 5}, ""),
        ({"max_local_epochs": 2}, {"local-epochs": 3}, {}, "at most 2 epochs"),
        ({"max_local_epochs": 2}, {}, {"local_epochs": 3}, "at most 2 epochs"),
        ({"max_local_epochs": 2}, {"epochs": "99"}, {"local-epochs": 1}, "at most 2 epochs"),
        ({"max_local_epochs": 2}, {"local-epochs": 1, "local_epochs": 9}, {}, "at most 2 epochs"),
        ({"max_local_epochs": 2}, {"local-epochs": 9, "local-steps": 1}, {}, "at most 2 epochs"),
        ({"max_local_epochs": 2}, {"local-epochs": 2}, {"lr": 0.1}, ""),
        ({"min_group_size": 3}, {}, {}, "does not state the size of its groups."),
        ({"min_group_size": 3}, {"group-size": 2}, {}, "its group in this round has 2"),
        ({"min_group_size": 3}, {"group-size": 3}, {}, ""),
        ({"keep_layers": "head"}, {}, {}, "does not send its layers 'head'"),
        ({"keep_layers": "other"}, {}, {}, ""),
        ({"label_counts": False}, {"label-counts": True}, {}, "does not share its label counts"),
    ],
)  # fmt: skip
def test_a_run_that_asks_for_more_than_the_silo_allows_is_refused(
    policy: dict[str, Any], config: dict[str, Any], run_config: dict[str, Any], said: str
) -> None:
    app, seen = echo()
    reply = asked(ForeignApp(app), settings(**policy), config, run_config=run_config)
    if not said:
        assert not reply.has_error() and len(seen) == 1
        return
    assert reply.error.code == wire.REFUSED and said in str(reply.error.reason)
    assert len(seen) == ("keep_layers" in policy), "refused before any work"


def test_arrays_cannot_leave_by_another_kind_of_message_without_a_group() -> None:
    app, _ = echo()
    reply = asked(ForeignApp(app), settings(min_group_size=3), kind="evaluate")
    assert "needs groups of at least 3" in str(reply.error.reason)


def test_no_model_leaves_beside_the_one_received_if_the_silo_says_so() -> None:
    extra = ArrayRecord({"d": Array(np.ones(3))})
    app, _ = echo(discriminator=extra)
    assert not asked(ForeignApp(app), settings()).has_error()
    reply = asked(ForeignApp(app), settings(auxiliary=False))
    assert "its app also sends 'discriminator'." in str(reply.error.reason)


def test_a_silo_with_a_smallest_group_tells_the_server() -> None:
    app, _ = echo()
    reply = asked(ForeignApp(app), settings(min_group_size=3), {"group-size": 4})
    assert reply.content["metrics"]["min-group-size"] == 3
    assert "min-group-size" not in asked(ForeignApp(app), settings()).content["metrics"]


def test_flowers_mods_go_around_a_foreign_app_and_the_ledger_sees_what_they_make(
    tmp_path: Path,
) -> None:
    order: list[str] = []

    def zero(message: Message, context: Context, call_next: Any) -> Message:
        order.append("zero")
        assert context.node_config == {"partition-id": 1, "num-partitions": 2}
        reply = call_next(message, context)
        reply.content["arrays"] = ArrayRecord({"only": Array(np.zeros(1))})
        return reply

    def second(message: Message, context: Context, call_next: Any) -> Message:
        order.append("second")
        return call_next(message, context)

    app, _ = echo()
    reply = asked(ForeignApp(app, [zero, second]), settings(tmp_path))
    assert order == ["zero", "second"] and list(reply.content["arrays"]) == ["only"]
    noted = json.loads((tmp_path / "ledger.jsonl").read_text())
    assert [tensor["name"] for tensor in noted["tensors"]] == ["only"]


# ---------------------------------------------------------------- from names and options


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("tests.apps.quick_numpy", "must be given as MODULE:ATTRIBUTE"),
        ("no_such_package.client:app", "cannot be imported: No module named 'no_such_package'"),
        ("tests.apps.quick_numpy:nothing", "has no attribute 'nothing'"),
        ("tests.apps.quick_numpy:initial", "must be a flwr.clientapp.ClientApp. Got function"),
    ],
)
def test_an_app_that_is_none_is_refused_with_what_is_wrong(reference: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said.replace(".", r"\.")):
        load_app(reference)


def test_apps_and_mods_are_found_by_name() -> None:
    assert load_app("tests.apps.quick_numpy:app") is quick_numpy.app
    assert callable(load_mod("flwr.clientapp.mod:arrays_size_mod"))
    with pytest.raises(SettingsError, match="must be a function of message, context"):
        load_mod("flwr.clientapp.mod:LocalDpMod")


def test_options_of_a_command_line_are_read_as_flowers_node_config() -> None:
    given = {"a": "3", "b": "0.5", "c": "true", "d": "'x y'", "e": "/data/north", "f": "[1, 2]"}
    assert typed(given) == {
        "a": 3, "b": 0.5, "c": True, "d": "x y", "e": "/data/north", "f": "[1, 2]"
    }  # fmt: skip
    assert typed({"a": "1\nb = 2"}) == {"a": "1\nb = 2"}


def test_partitions_of_an_app_are_told_as_flower_tells_them() -> None:
    silos = settings_of(SiloSettings("silo", options={"x": 1}), "1-2/3", for_app=True)
    assert [one.options for one in silos] == [
        {"x": 1, "num-partitions": 3, "partition-id": number} for number in (1, 2)
    ]


@pytest.mark.parametrize("layers", ["head", "norm"])
def test_layers_that_only_a_task_knows_are_refused_at_the_start(layers: str) -> None:
    with pytest.raises(SettingsError, match="only of a task is it known which layers"):
        check_policy(settings(keep_layers=layers))
    check_policy(settings(keep_layers="encoder."))


def test_what_holds_for_an_app_and_what_does_not_is_said() -> None:
    text = "\n".join(
        conditions(
            settings(
                strategies=("hcct",), min_group_size=3, max_local_epochs=2,
                share_metrics=("loss",), auxiliary=False,
            )
        )
    )  # fmt: skip
    assert "partition-id=1, num-partitions=2" in text
    assert "takes part only in hcct" in text and "at least 3 silos" in text
    assert "more than 2 local epochs" in text and "numbers of samples, loss" in text
    assert "Not checked for an app" in text and "Without effect: task, device, threads" in text


def test_silo_check_says_what_it_can_of_an_app() -> None:
    text = "\n".join(check_app(settings(), "tests.apps.quick_numpy:app", []))
    assert "app       tests.apps.quick_numpy:app, answers train, evaluate" in text
    assert "It was loaded, but not run:" in text and "Not checked for an app" in text


def test_silo_check_and_start_take_an_app(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = str(tmp_path / "north")
    assert silo(["init", "--name", "north", "--home", home]) == 0
    assert silo(["check", "--home", home, "--app", "tests.apps.quick_numpy:app"]) == 0
    assert "answers train, evaluate" in capsys.readouterr().out
    assert silo(["serve", "--home", home, "--app", "tests.apps.quick_numpy:app"]) == 2
    assert "has not joined a federation" in capsys.readouterr().err
    assert silo(["serve", "--home", home, "--mod", "a:b"]) == 2
    assert "requires --app" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--name", "a", "--app", "no_such_package:app"], "cannot be imported"),
        (["--name", "a", "--mod", "x:y"], "requires --app"),
        (["--simulation", "x.toml", "--app", "a:b"], "To serve an app as several silos"),
    ],
)
def test_an_app_that_cannot_be_served_is_refused_before_anything_joins(
    arguments: Sequence[str], said: str
) -> None:
    done = coterie("silo", "serve", *arguments, "--retry-for", "0")
    assert done.returncode == 2 and said in done.stderr


# ---------------------------------------------------------------- the run's configuration


def fab(manifest: bytes, name: str = "pyproject.toml") -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr(name, manifest)
    return file.getvalue()


def test_the_runs_configuration_is_read_from_its_fab() -> None:
    config = {"lr": 0.1, "name": "x", "model": {"width": 3}}
    manifest = tomli_w.dumps({"tool": {"flwr": {"app": {"config": config}}}}).encode()
    assert link._config_of(fab(manifest)) == {"lr": 0.1, "name": "x", "model.width": 3}
    assert link._config_of(b"") == {}


@pytest.mark.parametrize(
    "content",
    [
        b"no zip",
        fab(b"", "other.toml"),
        fab(b"\xff"),
        fab(b"= ="),
        fab(b"tool = 3"),
        fab(b"[tool.flwr.app.config]\nx = [1]"),
        fab(b"a = " + b"[" * 5000),
        fab(b"#" * (link.MAX_MANIFEST + 1)),
    ],
    ids=["no-zip", "no-manifest", "no-text", "no-toml", "no-table", "list", "deep", "bomb"],
)
def test_a_fab_that_cannot_be_read_leaves_the_app_without_configuration(
    content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="coterie.silo"):
        assert link._config_of(content) == {}
    assert "cannot be read from its FAB" in caplog.text
