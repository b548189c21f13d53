"""``coterie silo check``: what the silo would train on, whether it can, and what would leave it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from coterie.client.home import personal
from coterie.client.home.policy import METRICS, Policy
from coterie.client.home.settings import SiloSettings
from coterie.client.work.sgd import Stopwatch, TrainPlan, train
from coterie.client.work.tensors import evaluate, read_weights
from coterie.client.work.workbench import Workbench, open_workbench


def check(settings: SiloSettings) -> Iterator[str]:
    """Load, train one epoch, and report, line by line. Nothing is sent anywhere.

    Raises:
        TaskError, SettingsError: the silo cannot train as it is set up.
    """
    bench = open_workbench(settings)
    personal.check_policy(bench)
    yield from _data_lines(bench)
    yield from _step_lines(bench)
    yield from _leaving_lines(bench)


def _data_lines(bench: Workbench) -> Iterator[str]:
    data, task = bench.data, bench.task
    yield f"silo      {bench.settings.name}"
    yield f"task      {task.name}, {task.num_classes} classes, schema {bench.schema}"
    yield f"device    {bench.device}"
    for part, x, y in (
        ("training", data.x_train, data.y_train),
        ("test", data.x_test, data.y_test),
    ):
        counts = torch.bincount(y.cpu(), minlength=task.num_classes).tolist()
        names = getattr(task, "classes", None) or range(task.num_classes)
        each = ", ".join(f"{name}: {count}" for name, count in zip(names, counts, strict=True))
        shape = "×".join(str(n) for n in x.shape[1:])
        yield f"{part:9} {len(x)} samples of {shape}, from {x.min():.3g} to {x.max():.3g} ({each})"
    for line in getattr(task, "notes", list)():
        yield f"          {line}"


def _step_lines(bench: Workbench) -> Iterator[str]:
    before = evaluate(bench.task, bench.model, bench.data)
    with Stopwatch() as watch:
        loss = train(
            bench.task, bench.model, bench.data, TrainPlan(epochs=1, batch_size=16, lr=0.01), seed=0
        )
    after = evaluate(bench.task, bench.model, bench.data)
    yield (
        f"one epoch in {watch.seconds:.2f} s: loss {loss:.3f}; error on own test data "
        f"{100 * before.error:.1f} % before, {100 * after.error:.1f} % after"
    )


def _leaving_lines(bench: Workbench) -> Iterator[str]:
    policy = bench.settings.policy
    model = read_weights(bench.model)
    kept = personal.personal_names(bench, policy.keep_layers)
    shared = personal.without(model, kept)
    size = sum(array.nbytes for array in shared.values())
    described = bench.describe()
    yield ""
    yield "When the silo joins, this would leave it:"
    yield f"  name {described.name}, {described.num_examples} (the number of training samples),"
    yield f"  task {described.task}, schema {described.schema}, device {described.device},"
    yield f"  alpha {described.alpha}, min_group_size {described.min_group_size},"
    yield f"  max_local_epochs {described.max_local_epochs}, versions"
    yield f"In every round, at most: {len(shared)} arrays of the model, {size:,} bytes:"
    for name, array in shared.items():
        yield f"  {name} {'×'.join(map(str, array.shape)) or 'one number'} {array.dtype}"
    names = list(METRICS) if policy.metrics is None else list(policy.metrics)
    if policy.auxiliary and policy.min_group_size <= 2:  # they are averaged in pairs
        yield "  (in runs of fedcollab also a discriminator per other silo, and how often it is"
        yield "  right)"
    yield f"  and metrics: numbers of samples{''.join(f', {name}' for name in names)}"
    if kept:
        yield f"Kept here, whatever a run asks for: {', '.join(kept)}"
    if policy.label_counts:
        yield "In runs of fedgen also the number of training samples of each label: you allow it."
        yield "Every silo is told the labels' shares over all silos: where there are only two, each"
        yield "can work out the other's numbers."
        yield "Labels and samples do not leave."
    else:
        yield "Labels, samples and counts per label do not leave."
    yield from _condition_lines(policy)


def _condition_lines(policy: Policy) -> Iterator[str]:
    if policy.strategies:
        yield f"Takes part only in: {', '.join(policy.strategies)}"
    if policy.min_group_size > 1:
        yield f"Its updates are only averaged in groups of at least {policy.min_group_size} silos."
    if policy.max_local_epochs:
        yield f"Refuses runs of more than {policy.max_local_epochs} epochs per round."
    if policy.max_rounds:
        yield f"Refuses runs of more than {policy.max_rounds} rounds."
