"""Preparation of a process before its silos join, so that no round waits for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from coterie.client.home.settings import SiloSettings
from coterie.client.work.data import Data
from coterie.client.work.measure import evaluate
from coterie.client.work.personal import check_policy
from coterie.client.work.session import Session, keep_open, open_sessions
from coterie.client.work.sgd import TrainPlan, train
from coterie.features.privacy.silo import check_privacy
from coterie.tasks.base import Option, Task


def prepare(silos: Sequence[SiloSettings]) -> list[Session]:
    """Open the sessions of a process's silos and warm them up.

    ``silos``: one, or several of a simulation, which share all but their data. Raises
    ``TaskError`` or ``SettingsError`` if one cannot train as it is set up.
    """
    sessions = open_sessions(silos)
    for session in sessions:
        check_policy(session)
        check_privacy(session.whole[0])
    # The largest: a simulation may go on without silos that are too small to train.
    training = [session for session in sessions if session.settings.trains]
    if training:
        largest = max(training, key=lambda session: len(session.data.train))
        for own in largest.whole:
            warm_up(own.task, own.model, own.data)
    keep_open(sessions)
    return sessions


def prepare_nodes(node_configs: Sequence[Mapping[str, Option]]) -> None:
    """Prepare silos by their node configs, as a Grid in one process has them."""
    prepare([SiloSettings.from_node_config(own, node_id=0) for own in node_configs])


def warm_up(task: Task, model: nn.Module, data: Data) -> None:
    """Run every kind of work once on a few samples: first calls are slow, and fail early here.

    The model's weights change; every message overwrites them. Raises ``TooFewError``.
    """
    train_part, test_part = (
        part.take(torch.arange(min(len(part), 4))) for part in (data.train, data.test)
    )
    evaluate(task, model, test_part)
    train(task, model, train_part, TrainPlan(epochs=1, batch_size=4, lr=1e-6), seed=0)
