"""The models that a silo saves on its disk: safetensors files, each with a model card.

The file's metadata repeat the card, so that the file alone is enough to use the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from flwr.app import ConfigRecord
from safetensors import SafetensorError, safe_open

from coterie import wire
from coterie.client.home.best import Best
from coterie.client.home.rounds import file_of, write_model
from coterie.client.home.settings import SettingsError
from coterie.client.work.data import Part
from coterie.client.work.measure import Evaluation
from coterie.client.work.session import Session
from coterie.system.files import write_atomically
from coterie.system.processes import utc_now
from coterie.tasks.base import ColumnScale, Option
from coterie.tasks.draws import num_persons
from coterie.tasks.trees import Trees, importance
from coterie.wire import Model, model_hash

METADATA = "coterie-card"
PERSONALISED: Final = "personalised"
"""Folder of the models as the silo itself trained them."""
HERE: Final = "here"


@dataclass(frozen=True)
class Calibration:
    """A saved model's calibration at this silo, made by ``coterie silo calibrate``.

    Attributes:
        temperature: divides the outputs before they become probabilities.
        thresholds: probabilities above which the answer is positive: one for the second of two
            classes, or one per label. If empty, the answer is the most likely class.
        positive: the answer above a threshold: the second class's name, or ``yes``.
        rule: a text on how the thresholds were chosen; empty without thresholds.
        part: the data it was fitted on, some or all of it: ``validation`` or ``test``.
        part_examples, part_persons: size of that part; 0 persons: each sample is another person's.
        examples: the samples of that part used to fit temperature and thresholds.
        measured: number of the test samples behind ``figures``, none of which was fitted on.
        figures: metric → value, and low and high end of its 95% interval, after calibration.
    """

    temperature: float
    thresholds: tuple[float, ...]
    positive: str
    rule: str
    part: str
    part_examples: int
    examples: int
    measured: int
    figures: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    part_persons: int = 0

    def text(self) -> str:
        """Return one sentence for people, without a full stop."""
        where = (
            f"all {self.examples} samples of the validation data"
            if self.part == "validation"
            else f"{self.examples} of the {self.part_examples} test samples"
        )
        above = ", ".join(f"{threshold:.4g}" for threshold in self.thresholds)
        said = f"temperature {self.temperature:.4g}"
        said += f", {self.positive!r} above {above} ({self.rule})" if above else ""
        return f"{said}, fitted on {where} of this silo, which were not used for training"


@dataclass(frozen=True)
class Card:
    """The model card of a saved model.

    Attributes:
        task: the task's name on the wire; ``source`` is the task as the silo's settings name it.
        round, rounds: the model's round, and the number of rounds of the run.
        group: number of the silo's group, from 1; 0 without a group.
        members: the names of the group's silos, where the run discloses them.
        trained: ``together`` with the group, or ``here``: as this silo last trained it, before
            averaging.
        num_examples: training samples of this silo.
        num_persons, test_persons: persons behind the training and the test samples; 0 if unknown.
        test_error, test_loss, test_examples: measured on this silo's test data.
        validation_error: on validation data, if the model was chosen by it.
        metric, unit: the primary metric, and its unit, in which the errors are given.
        figures: metric → value, and low and high end of its 95% interval.
        trivial: metric → its value for the best constant answer.
        validation, seed: the run's share of held-out training data, and its seed, which selects
            them.
        calibration: of the outputs; None if they are used unchanged.
        sha256: ``wire.model_hash`` of the arrays.
        kept: when the model was saved, ISO 8601.
        fingerprint: of the task's declaration; empty without one.
        frozen: ``weights.frozen_digest`` of the frozen part, which is not in the file; empty
            without one.
        data_hash: ``session.hash_of`` the training data, validation data included.
        best_of: the last round among which this model was the best, on ``validation_examples``
            validation samples; 0 if it is the last round's model.
        task_values: the run's keys for the task (``Task.run_values``) that made the model.
        privacy: with differential privacy: ``epsilon``, spent over all runs when the model was
            saved, ``delta``, ``noise`` and ``clip``; else empty.
        scale, scale_from: a table's column scale, and its origin: ``silo`` or ``federation``.
        placed: for a silo that trains nothing, a text on how the coordinator chose this model.
            ``num_examples`` then counts its test samples, or, without labels, its samples, and
            nothing was measured.
        parent: the run or the file from which the run began; empty if it began from neither.
        counted: a text on how many of the silo's data files were used and how many left out.
        importance: of boosted trees: input → its share of the reduction of the loss.
    """

    silo: str
    task: str
    source: str
    run: str
    strategy: str
    round: int
    rounds: int
    group: int
    group_size: int
    members: tuple[str, ...]
    trained: str
    num_examples: int
    test_error: float
    test_loss: float
    test_examples: int
    validation_error: float | None
    sha256: str
    kept: str
    versions: Mapping[str, str]
    fingerprint: str = ""
    data_hash: str = ""
    scale: ColumnScale | None = None
    scale_from: str = "silo"
    metric: str = "error"
    unit: str = ""
    figures: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    trivial: Mapping[str, float] = field(default_factory=dict)
    validation: float = 0.0
    seed: int = 0
    calibration: Calibration | None = None
    frozen: str = ""
    task_values: Mapping[str, Option] = field(default_factory=dict)
    best_of: int = 0
    validation_examples: int = 0
    privacy: Mapping[str, float] = field(default_factory=dict)
    placed: str = ""
    counted: str = ""
    num_persons: int = 0
    test_persons: int = 0
    parent: str = ""
    importance: Mapping[str, float] = field(default_factory=dict)

    @property
    def scaled(self) -> bool:
        """Whether the scale has means and deviations; that of trees changes nothing."""
        return any(tuple(one) != (0.0, 1.0) for one in self.scale or ())

    @property
    def alone(self) -> bool:
        """Whether it was trained with this silo's data only."""
        shared = self.trained == HERE or self.placed
        return self.trained == "alone" or (not shared and self.group_size == 1)


def card_of(
    session: Session,
    config: ConfigRecord,
    model: Model,
    tested: Evaluation,
    *,
    here: bool = False,
    best: Best | None = None,
) -> Card:
    """Return the card of a model that the silo is about to save.

    ``config`` is from the message that brought the model, and ``tested`` the evaluation of this
    model on the silo's test data. ``here`` means the model as the silo has just trained it;
    ``best`` is the validation result, if the model is the best of several rounds.
    """
    members = config.get(wire.MEMBERS, [])
    description = session.describe()
    validation = config.get(wire.VALIDATION, 0.0)
    spared = float(validation) if isinstance(validation, int | float) else 0.0
    return Card(
        silo=session.settings.name,
        task=session.task.name,
        source=session.settings.task,
        run=str(config.get(wire.RUN, "run")),
        strategy=wire.plain_text(config.get(wire.STRATEGY, "")),
        round=_whole(config, wire.ROUND) if best is None else best.round,
        rounds=_whole(config, wire.ROUNDS),
        group=_whole(config, wire.GROUP),
        group_size=_whole(config, wire.GROUP_SIZE),
        members=tuple(map(wire.plain_text, members)) if isinstance(members, list) else (),
        trained=HERE if here else "together",
        num_examples=description.num_examples,
        test_error=tested.error,
        test_loss=tested.loss,
        test_examples=tested.num_examples,
        validation_error=None if best is None else best.error,
        sha256=model_hash(model),
        kept=utc_now(),
        versions=dict(description.versions or {}),
        fingerprint=str(getattr(session.task, "fingerprint", "")),
        data_hash=session.data_hash,
        scale=session.scale,
        scale_from="federation" if session.task.pooled_columns else "silo",
        metric=str(config.get(wire.METRIC, "")) or description.metric,
        unit=description.unit,
        figures={n: (f.value, f.low, f.high) for n, f in tested.figures.items()},
        trivial=dict(tested.trivial),
        validation=spared,
        seed=_whole(config, wire.SEED),
        frozen=session.frozen,
        task_values=dict(session.task.run_values),
        best_of=0 if best is None else _whole(config, wire.ROUND),
        validation_examples=0 if best is None else best.samples,
        privacy=session.loop.figures(),
        placed="" if session.settings.trains else _placed(config),
        counted="; ".join(getattr(session.task, "counted", list)()),
        num_persons=_persons_of(session.data.train),
        test_persons=_persons_of(session.data.test),
        parent=wire.plain_text(str(config.get(wire.PARENT, ""))),
        importance=_importance(session, model),
    )


def _importance(session: Session, model: Model) -> dict[str, float]:
    if not isinstance(session.model, Trees):
        return {}
    prepared = session.task.prepared(session.settings.options)
    return importance(model["gain"], prepared.get("columns", ()))


def _persons_of(part: Part) -> int:
    return 0 if part.persons is None else num_persons(part.persons)


def _placed(config: ConfigRecord) -> str:
    how = config.get(wire.PLACED, "")
    return wire.plain_text(how) if isinstance(how, str) and how else "the run did not report how"


def _whole(config: ConfigRecord, key: str) -> int:
    value = config.get(key, 0)
    return value if isinstance(value, int) else 0


def keep_model(home: str, card: Card, model: Model, *, final: bool | None = None) -> Path:
    """Write the model and its card; return the model's file.

    The final model has the run's name; an earlier one also has its round in the name. Of the models
    that this silo itself trained, only the last is saved, in a separate folder. If ``final`` is
    None, the number of planned rounds decides whether the run has ended.
    """
    if card.trained == HERE:
        file = file_of(home, PERSONALISED, card.run)
    else:
        final = card.round >= card.rounds if final is None else final
        name = card.run if final else f"{card.run}-round-{card.round:06d}"
        file = file_of(home, "models", name)
    write_card(file, card, model)
    return file


def write_card(file: Path, card: Card, model: Model) -> None:
    """Write the model with this card, replacing the file's previous content."""
    write_model(file, model, metadata={METADATA: json.dumps(asdict(card))})
    write_atomically(file.with_suffix(".md"), _text(card, file).encode())


def _metadata(opened: Any, file: Path) -> str:
    metadata = opened.metadata() or {}
    if METADATA not in metadata:
        raise SettingsError(
            f"{file} has no model card. Take the file from models/ in a silo's folder: those in a "
            "run's folder at the coordinator have none."
        )
    return str(metadata[METADATA])


def read_card(file: Path) -> Card:
    """Return the card in a saved model's file.

    Raises:
        SettingsError: the file is not a saved model.
    """
    try:
        with safe_open(file, framework="np") as opened:
            values = json.loads(_metadata(opened, file))
        values["members"] = tuple(values["members"])
        if (own := values.get("calibration")) is not None:
            values["calibration"] = Calibration(**own | {"thresholds": tuple(own["thresholds"])})
        return Card(**values)
    except RecursionError:
        raise SettingsError(
            f"{file} is not a model saved by a silo: its card is nested too deeply."
        ) from None
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise SettingsError(f"{file} is not a model saved by a silo: {error}") from None


def _how_trained(card: Card) -> str:
    if card.placed:
        only = "only tests" if card.test_examples else "has samples without labels"
        return f"by its group; this silo {only}"
    if card.trained == HERE:
        return "as this silo trained it last, before it was averaged"
    return "alone: no other silo was in its group" if card.alone else card.trained


def _text(card: Card, file: Path) -> str:
    rows = {
        **_origin_rows(card),
        **_sample_rows(card),
        **_privacy_rows(card),
        "SHA-256 of the arrays": card.sha256,
        "Kept": card.kept,
        "Versions": ", ".join(f"{k} {v}" for k, v in sorted(card.versions.items())),
    }
    if card.frozen:
        rows["SHA-256 of the frozen part, which is not in this file"] = card.frozen
    traces = "" if not card.scaled else f", and mean and deviation of {numbers_of(card)}"
    called = f"{PERSONALISED}/{file.stem}" if card.trained == HERE else file.name
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    return (
        f"# Model of silo {card.silo}\n\n| | |\n|---|---|\n{table}{_figure_tables(card)}\n\n"
        f"Use it, in the silo's folder:\n\n    coterie silo predict --model {called}\n\n"
        "It was made for this silo's data. It may contain traces of the data of the group's silos"
        f"{traces}: share it only as they agreed.\n"
    )


def _origin_rows(card: Card) -> dict[str, str]:
    who = ", ".join(card.members) if card.members else "their names are not shared"
    of = f", {wire.counted(card.group_size, 'silo')}: {who}"
    size = f"of {wire.counted(card.group_size, 'silo')}" if card.trained == HERE else "none"
    return {
        "Silo": card.silo,
        "Task": card.task,
        "Run": f"{card.run}, strategy {card.strategy or 'unknown'}",
        "Rounds": f"{card.round} of {card.rounds or 'unknown'}",
        "Group": size if not card.group else f"{card.group}{'' if card.group_size == 1 else of}",
        "Trained": _how_trained(card),
        **({"Begun from": card.parent} if card.parent else {}),
    }


def _sample_rows(card: Card) -> dict[str, str]:
    rows = {}
    if card.placed:
        rows["How it was chosen"] = card.placed
    if card.placed and not card.test_examples:
        rows["Samples of this silo, without labels"] = str(card.num_examples)
        rows[f"{_title(card)} on this silo's data"] = "not known without labels"
    else:
        if not card.placed:
            rows["Training samples of this silo"] = f"{card.num_examples}{_of(card.num_persons)}"
        rows[f"{_title(card)} on this silo's test data"] = (
            f"{value_text(card, card.test_error)} of {wire.counted(card.test_examples, 'sample')}"
            f"{_of(card.test_persons)} (loss {wire.readable(card.test_loss, figures=4)})"
        )
    if card.counted:
        rows["Files of this silo's data"] = card.counted
    if card.best_of and card.validation_error is not None:
        rows["Chosen"] = (
            f"the model after round {card.round}, the best of those measured until round "
            f"{card.best_of}, by {lead_of(card).title} on validation data: "
            f"{value_text(card, card.validation_error)} of "
            f"{wire.counted(card.validation_examples, 'sample')}"
        )
    if card.calibration is not None:
        rows["Calibrated"] = card.calibration.text()
    return rows


def _privacy_rows(card: Card) -> dict[str, str]:
    rows = {}
    if card.privacy:
        spent = card.privacy
        rows["Differential privacy of this silo's training samples"] = (
            f"ε {spent['epsilon']:.3g} at δ {spent['delta']:.3g}, if one row is added or "
            "removed, including all training on them so far "
            f"(noise {spent['noise']:g}, clip {spent['clip']:g})"
        )
        if card.num_persons:
            rows["Differential privacy of one person"] = (
                "not counted: ε applies to one sample; for a person with k samples it is up to "
                "k times that"
            )
    if card.task_values:
        keys = card.task_values.items()
        rows["Keys of the task"] = ", ".join(f"task.{key} = {value}" for key, value in keys)
    return rows


def _figure_tables(card: Card) -> str:
    table = ""
    figures = "\n".join(figure_row(card, *entry) for entry in card.figures.items())
    if figures:
        table += (
            "\n\nOn this silo's test data, with 95% intervals (bootstrap), and the constant "
            "baseline:\n\n"
            f"| | | interval | trivial |\n|---|---|---|---|\n{figures}"
        )
    if card.calibration is not None and card.calibration.figures:
        own_figures = "\n".join(
            figure_row(card, *entry, trivial=False) for entry in card.calibration.figures.items()
        )
        table += (
            f"\n\nWith calibration, on {card.calibration.measured} test samples not used for it:"
            f"\n\n| | | interval |\n|---|---|---|\n{own_figures}"
        )
    if card.importance:
        shares = "\n".join(f"| {name} | {share:.3f} |" for name, share in card.importance.items())
        table += f"\n\nWhat the trees split by:\n\n| input | share |\n|---|---|\n{shares}"
    return table


def _of(persons: int) -> str:
    return f" of {wire.counted(persons, 'person')}" if persons else ""


def numbers_of(card: Card) -> str:
    """Return whose data the card's scale was computed from, for people."""
    return "the federation's numbers" if card.scale_from == "federation" else "this silo's numbers"


def lead_of(card: Card) -> wire.Metric:
    """Return the card's primary metric, in which its errors are given."""
    return wire.KNOWN_METRICS[card.metric]


def _title(card: Card) -> str:
    title = lead_of(card).title
    return title[0].upper() + title[1:]


def value_text(card: Card, shortfall: float) -> str:
    """Return a shortfall (``Metric.shortfall``) for people; an error has two decimals."""
    lead = lead_of(card)
    if lead.name == "error":
        return f"{100 * shortfall:.2f}%"
    return lead.text(lead.shortfall(shortfall), card.unit)


def figure_texts(card: Card, name: str, figure: tuple[float, float, float]) -> tuple[str, str, str]:
    """Return a metric's title, its value and its interval."""
    metric = wire.KNOWN_METRICS[name]
    value, low, high = (metric.text(number, _unit(card, name)) for number in figure)
    return metric.title, value, f"{low} to {high}"


def figure_row(
    card: Card, name: str, figure: tuple[float, float, float], *, trivial: bool = True
) -> str:
    """Return a Markdown table row: title, value and interval.

    With ``trivial`` also the value of the best constant answer, which is that on all test data.
    """
    best = card.trivial.get(name, float("nan"))
    said = [wire.KNOWN_METRICS[name].text(best, _unit(card, name))] if trivial else []
    return f"| {' | '.join((*figure_texts(card, name, figure), *said))} |"


def _unit(card: Card, name: str) -> str:
    return card.unit if name in ("mae", "rmse") else ""
