"""Likely problems of a silo's data, shown by ``coterie silo check`` and at every start."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b

import numpy as np
import torch

from coterie import wire
from coterie.client.work.data import Data, Part
from coterie.client.work.measure import batch_size
from coterie.tasks.base import Task, leaves
from coterie.tasks.draws import num_persons
from coterie.tasks.problems import Labels, Masks, Survival
from coterie.wire import counted

FEW = 20
"""Fewer samples than this show hardly anything."""
HARDLY_ANY = 5
"""With fewer training samples than this, an update nearly reveals the samples."""
LITTLE = {
    "training": "a model learns little from so few samples",
    "test": "measurements on so few samples are uncertain",
}
SAME = "only some metrics are defined, and a constant answer is always right"


def warnings_of(task: Task, data: Data, *, duplicates: bool = True) -> Iterator[str]:
    """Yield likely problems, each a sentence without a full stop.

    The task must have loaded the data last, and may add warnings. ``duplicates``: look for test
    samples among the training samples, which reads all of them.
    """
    yield from getattr(task, "warnings", list)()
    if (number := len(data.train)) < HARDLY_ANY:
        yield (
            f"every round sends an update made from only {wire.counted(number, 'sample')}, "
            "which may reveal its contents. A silo with labels cannot take part only for "
            f"testing; see {wire.page('Test a model without training')}"
        )
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
