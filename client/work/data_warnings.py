"""Likely problems of a silo's data, shown by ``coterie silo check`` and at every start."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b

import numpy as np
import torch

from coterie.client.work.data import Data, Part
from coterie.client.work.measure import batch_size
from coterie.client.work.session import Session
from coterie.tasks.base import leaves
from coterie.tasks.draws import num_persons
from coterie.tasks.problems import Labels, Masks, Survival
from coterie.tasks.trees import Trees
from coterie.wire import counted, page

FEW = 20
"""Fewer samples than this show hardly anything."""
LITTLE = {
    "training": "a model learns little from so few samples",
    "test": "measurements on so few samples are uncertain",
}
SAME = "only some metrics are defined, and a constant answer is always right"


def warnings_of(session: Session, *, duplicates: bool = True) -> Iterator[str]:
    """Yield likely problems, each a sentence without a full stop.

    The task must have loaded the data last, and may add warnings. ``duplicates``: look for test
    samples among the training samples, which reads all of them.
    """
    task, data = session.task, session.data
    yield from getattr(task, "warnings", list)()
    if not session.settings.tests and not isinstance(session.model, Trees):  # else it sends none
        yield from _few_behind(data.train, session.settings.policy.min_samples)
    for name, part in (("training", data.train), ("test", data.test)):
        if len(part) < FEW:
            yield f"only {counted(len(part), f'{name} sample')}: {LITTLE[name]}"
        elif part.persons is not None and (persons := num_persons(part.persons)) < FEW:
            yield (
                f"the {len(part)} {name} samples are from only {counted(persons, 'person')}: "
                f"{LITTLE[name]}"
            )
        if isinstance(task.problem, Masks):
            continue
        y = part.targets().cpu()
        if isinstance(task.problem, Survival):
            if not y[:, 1].any():
                yield f"no event among the {name} samples: the concordance index is not defined"
            elif len(y) > 1 and y[:, 1].all():
                yield (
                    f"every {name} sample has the event: no time is censored. Are the events coded "
                    "as declared?"
                )
        elif len(y) > 1 and len(y.unique(dim=0)) == 1:
            what = {"class": "class", "number": "target"}.get(task.problem.kind, "labels")
            yield f"all {name} samples have the same {what}: " + (
                "there is nothing to distinguish" if name == "training" else SAME
            )
        elif isinstance(task.problem, Labels):
            for column in torch.nonzero((y == y[0]).all(dim=0)).flatten().tolist():
                named = task.classes[column] if task.classes else str(column)
                yield f"all {name} samples have the same {named}"
    yield from _on_both_sides(data)
    if not duplicates:
        return
    known = set(_digests(data.train))
    if twins := sum(one in known for one in _digests(data.test)):
        yield (
            f"{twins} of {counted(len(data.test), 'test sample')} "
            f"{'is' if twins == 1 else 'are'} equal to a training sample, including the target. "
            "If they are the same people, the measured errors are too small"
        )


def _few_behind(train: Part, least: int) -> Iterator[str]:
    whose = train.persons
    behind, one = (len(train), "sample") if whose is None else (num_persons(whose), "person")
    if behind < least:
        yield (
            f"every round sends an update made from only {counted(behind, one)}, fewer than "
            f"min_samples = {least}: samples may be reconstructed from it. The silo can also test "
            f"without training; see {page('Test a model without training')}"
        )


def _on_both_sides(data: Data) -> Iterator[str]:
    """Warn of persons with training and test samples, as in files that were given separately."""
    train, test = data.train.persons, data.test.persons
    if train is None or test is None:
        return
    if both := len(np.intersect1d(train, test)):
        are = "person has" if both == 1 else "persons have"
        yield (
            f"{both} {are} samples in both the training and the test data: the measured errors "
            "are probably too small"
        )


def _digests(part: Part) -> Iterator[bytes]:
    for x, y in part.batches(None, batch_size(part)):
        arrays = [leaf.cpu().numpy() for leaf in (*leaves(x), *leaves(y))]
        for row in range(len(arrays[0])):
            yield blake2b(b"".join(a[row].tobytes() for a in arrays), digest_size=16).digest()
