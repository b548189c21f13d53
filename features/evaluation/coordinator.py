"""The evaluation of given models at every silo, requested once in a run without training.

A silo that refuses, serves another task, or does not answer is listed with the reason; so is a
model that a silo is not sent.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict
from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass

from coterie import wire
from coterie.engine.port import Engine
from coterie.features.evaluation.answers import MOST_MODELS, Answer, decode_answer
from coterie.strategies import stored
from coterie.strategies.errors import FederationError, refused
from coterie.strategies.rounds.exchange import exchange
from coterie.strategies.rounds.roster import Silo

log = logging.getLogger("coterie.run")

FILE = "evaluation.json"
"""File name in the run's folder."""


@dataclass(frozen=True)
class Given:
    """A model that is evaluated.

    Attributes:
        name: unique: the letter of a group, the name of a silo that is alone, or that of a file.
        group: the silos that trained it; empty: unknown.
        sha256: of its arrays.
        only: whether only its group's silos are sent it, because it is of fewer silos than their
            policies or two.
    """

    name: str
    group: tuple[str, ...] = ()
    sha256: str = ""
    only: bool = False

    def may_go_to(self, silo: str) -> bool:
        return not self.only or silo in self.group


@dataclass(frozen=True)
class Judgement:
    """What the silos say of given models.

    Attributes:
        parent: the run, or the file, that the models are of.
        answers: silo → its answer.
        silent: silo → why it gives no figures at all, including silos that were not admitted.
    """

    task: str
    parent: str
    models: tuple[Given, ...]
    answers: Mapping[str, Answer] = field(default_factory=dict)
    silent: Mapping[str, str] = field(default_factory=dict)

    def announced(self) -> dict[str, wire.Scalar]:
        """Return the entry of each model by which a silo checks that it is sent no other."""
        return {f"{wire.GIVEN_HASH}{one.name}": one.sha256 for one in self.models}

    def why_empty(self, silo: str, model: Given) -> str:
        """Return why a silo has no error of a model; empty if it has one."""
        if silo in self.silent:
            return self.silent[silo]
        if not model.may_go_to(silo):
            return "not sent: the model of too few silos to be shown to others"
        answer = self.answers[silo]
        if wire.ERROR in answer.models.get(model.name, {}):
            return ""
        return (
            "kept back by the silo (share_metrics)"
            if wire.ERROR in answer.kept_back
            else "not defined on its test data"
        )


_JUDGEMENT = TypeAdapter(Judgement)


def ask_for_evaluations(
    engine: Engine,
    silos: Mapping[str, Silo],
    judgement: Judgement,
    models: Mapping[str, wire.Model],
    terms: Mapping[str, wire.Scalar],
    *,
    scale: Sequence[float] = (),
    deadline_s: float,
) -> Judgement:
    """Send every silo that is here the models that it may have, and return what they say.

    Args:
        models: by name.
        terms: describe the run to a silo.
        scale: of the run that the models are of, if its silos share one.
    """
    sent = {
        name: [one for one in judgement.models if one.may_go_to(name)] for name in sorted(silos)
    }
    sent = {name: own for name, own in sent.items() if own}
    config = {**terms, **({wire.SCALE: list(scale)} if scale else {})}
    encoded = {name: wire.encode_arrays(model, packed=True) for name, model in models.items()}
    messages = [_message(silos[name], own, encoded, config) for name, own in sent.items()]
    answers: dict[str, Answer] = {}
    silent = dict.fromkeys(silos.keys() - sent.keys(), "there is no model that it may be sent.")
    replies = exchange(engine, messages, deadline_s=deadline_s)
    for (name, own), reply in zip(sent.items(), replies, strict=True):
        try:
            answers[name] = decode_answer(wire.content_of(reply), [one.name for one in own])
            log.info("silo %s has evaluated %s", name, wire.counted(len(own), "model"))
        except wire.WireError as error:
            silent[name] = str(error)
            log.info("silo %s evaluates nothing: %s", name, error)
    return replace(judgement, answers=answers, silent=silent)


def _message(
    silo: Silo, models: Sequence[Given], encoded: Mapping[str, Any], terms: Mapping[str, Any]
) -> Message:
    config = ConfigRecord({**terms, wire.GIVEN: [one.name for one in models]})
    content = RecordDict({wire.CONFIG: config})
    for number, one in enumerate(models):
        content[f"{wire.MEMBER}{number}"] = encoded[one.name]
    return Message(content, silo.node_id, wire.EVALUATE_GIVEN, group_id="0")


def require_models(models: Sequence[Given], of: str) -> None:
    """Raise ``FederationError`` if there is no model, or too many for one message."""
    if not models:
        raise refused(f"{of} has no model that can be evaluated.")
    if len(models) > MOST_MODELS:
        raise refused(
            f"{of} has {len(models)} models; at most {MOST_MODELS} are evaluated at once. Name one "
            "of the files in its folder models/."
        )


def require_answers(judgement: Judgement) -> None:
    """Raise ``FederationError``, with the reasons, if no silo gave figures."""
    if not judgement.answers:
        raise FederationError(f"no silo evaluated the models. {wire.reasons(judgement.silent)}")


def write_judgement(file: Path, judgement: Judgement) -> None:
    """Write a judgement, atomically."""
    stored.write(file, _JUDGEMENT, judgement)


def read_judgement(file: Path) -> Judgement:
    """Read a written judgement; ``FederationError`` if there is none, or it is damaged."""
    return stored.read(file, _JUDGEMENT, "Run `coterie evaluate` again.")
