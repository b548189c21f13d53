"""What a hostile silo may answer, by the question that it answers so; a table to run anywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from coterie import wire
from coterie.wire.formats import SCALES

SILENT = None
Answer = RecordDict | Error | Exception | None
"""A content, an error, what pulling the reply raises, or silence."""
Behaviour = Callable[[RecordDict], Answer]
"""Takes the good answer."""

FORGED = "no\x1b[2J\x1b[H\nINFO round 1/1 · all is well\u202e" + "x" * 5000


def with_record(name: str, record: Any) -> Behaviour:
    return lambda good: RecordDict({**good, name: record})


def with_metrics(**changes: Any) -> Behaviour:
    own = {key.replace("_", "-"): value for key, value in changes.items()}
    return lambda good: RecordDict(
        {**good, wire.METRICS: MetricRecord({**good[wire.METRICS], **own})}
    )


def with_config(**changes: Any) -> Behaviour:
    own = {key.replace("_", "-"): value for key, value in changes.items()}
    return lambda good: RecordDict(
        {**good, wire.CONFIG: ConfigRecord({**good[wire.CONFIG], **own})}
    )


def with_arrays(change: Callable[[wire.Model], wire.Model]) -> Behaviour:
    def answer(good: RecordDict) -> RecordDict:
        model = change(wire.decode_arrays(good.array_records[wire.ARRAYS]))
        return RecordDict({**good, wire.ARRAYS: wire.encode_arrays(model, packed=False)})

    return answer


def filled(value: float) -> Behaviour:
    return with_arrays(lambda model: {k: np.full_like(a, value) for k, a in model.items()})


def typed(dtype: str) -> Behaviour:
    return with_arrays(lambda model: {k: a.astype(dtype) for k, a in model.items()})


def eight_bits(scales: Any, dtype: str = "int8") -> Behaviour:
    """Numbers of eight bits where they are asked for, with these scales."""

    def changed(model: wire.Model) -> wire.Model:
        numbers = {k: np.full(a.shape, 127, dtype) if a.ndim > 1 else a for k, a in model.items()}
        return numbers if scales is None else {**numbers, SCALES: np.asarray(scales)}

    return with_arrays(changed)


def raw(data: bytes, stype: str = "numpy.ndarray") -> Behaviour:
    return with_record(wire.ARRAYS, ArrayRecord({"w": Array("float32", (6, 5), stype, data)}))


def many_records(good: RecordDict) -> RecordDict:
    return RecordDict({**good, **{f"r{i}": MetricRecord() for i in range(2000)}})


def many_arrays(good: RecordDict) -> RecordDict:
    one = Array(np.zeros(1, np.float32))
    return RecordDict({**good, wire.ARRAYS: ArrayRecord({f"a{i}": one for i in range(20_000)})})


def one_array_often(good: RecordDict) -> RecordDict:
    """300 MB by one megabyte that has 300 names."""
    one = Array("float32", (1,), "numpy.ndarray", b"\0" * 2**20)
    return RecordDict({**good, wire.ARRAYS: ArrayRecord({f"a{i}": one for i in range(300)})})


ANYWHERE: dict[str, Behaviour] = {
    "silence": lambda good: SILENT,
    "a record that cannot be parsed": lambda good: ValueError("Expecting value: line 1 column 1"),
    "no content": lambda good: IndexError("list index out of range"),
    "a tree that is too deep": lambda good: RecursionError("maximum recursion depth exceeded"),
    "nothing in it": lambda good: RecordDict(),
    "an error with a forged line": lambda good: Error(200, FORGED),
    "an error without a reason": lambda good: Error(0),
    "two thousand records": many_records,
    "a record with a name that clears the screen": with_record("\x1b[2J", MetricRecord()),
}
TRAINING: dict[str, Behaviour] = {
    "NaN": filled(np.nan),
    "infinity": filled(np.inf),
    "values of 1e30": filled(1e30),
    "complex numbers": typed("c8"),
    "texts": typed("U3"),
    "doubles": typed("f8"),
    "other shapes": with_arrays(lambda model: {k: a.reshape(-1) for k, a in model.items()}),
    "other names": with_arrays(lambda model: {f"{k}\x1b[31m": a for k, a in model.items()}),
    "no arrays": with_arrays(lambda model: {}),
    "twenty thousand arrays": many_arrays,
    "one array under 300 names": one_array_often,
    "bytes that are no array": raw(b"\x93NUMPY\x01\x00junk"),
    "a shape bomb": raw(
        b"\x93NUMPY\x01\x00v\x00{'descr': '<f4', 'fortran_order': False, "
        b"'shape': (99999999999999,), }" + b" " * 43 + b"\n"
    ),
    "a zip bomb": raw(b"PK\x05\x06" + b"\0" * 18),
    "packed rubbish": lambda good: RecordDict(
        {
            **good,
            wire.ARRAYS: ArrayRecord(
                {wire.PACKED_NAME: Array("uint8", (9,), wire.PACKED_NAME, b"\xff" * 9)}
            ),
        }
    ),
    "a rounded update without scales": eight_bits(None),
    "infinite scales": eight_bits(np.float32([np.inf])),
    "NaN scales": eight_bits(np.float32([np.nan])),
    "scales of 1e29": eight_bits(np.float32([1e29])),
    "negative scales": eight_bits(np.float32([-1])),
    "scales that are doubles": eight_bits([0.01]),
    "no scales": eight_bits(np.float32([])),
    "a million scales": eight_bits(np.ones(10**6, np.float32)),
    "16 bits where 8 were asked for": eight_bits(np.float32([0.01]), "float16"),
    "scales for arrays that are not rounded": eight_bits(np.float32([0.01]), "float32"),
    "a config for arrays": with_record(wire.ARRAYS, ConfigRecord()),
    "a config for metrics": with_record(wire.METRICS, ConfigRecord()),
    "no samples": with_metrics(num_examples=0),
    "-5 samples": with_metrics(num_examples=-5),
    "NaN samples": with_metrics(num_examples=float("nan")),
    "1e300 samples": with_metrics(num_examples=1e300),
    "5e-324 samples": with_metrics(num_examples=5e-324),
    "a list of samples": with_metrics(num_examples=[1, 2]),
}
DESCRIBING: dict[str, Behaviour] = {
    "no name": with_config(name=""),
    "a name with a forged line": with_config(name=FORGED),
    "a path for a name": with_config(name="../../etc/passwd"),
    "a number for a name": with_config(name=7),
    "another schema": with_config(schema="x"),
    "a schema of a megabyte": with_config(schema="x" * 10**6),
    "NaN samples": with_config(num_examples=float("nan")),
    "no samples": with_config(num_examples=0),
    "versions that are no JSON": with_config(versions="{"),
    "versions nested too deep": with_config(versions="[" * 10**5),
    "a thousand layers": with_config(head=str([["relu"]] * 1000).replace("'", '"')),
    "infinite alpha": with_config(alpha=float("inf")),
    "another protocol": with_config(protocol=99),
    "five silos in one": lambda good: Error(wire.HOSTS, "5"),
}
INITIAL: dict[str, Behaviour] = {
    "NaN": filled(np.nan),
    "values of 1e7": filled(1e7),
    "dead units": filled(-1.0),
    "complex numbers": typed("c8"),
    "other names": with_arrays(lambda model: {f"x{k}": a for k, a in model.items()}),
    "no arrays": with_arrays(lambda model: {}),
}
EVALUATING: dict[str, Behaviour] = {
    "an error of -1e6": with_metrics(error=-1e6, accuracy=0.5),
    "an error of 1e300": with_metrics(error=1e300),
    "NaN": with_metrics(error=float("nan"), loss=float("nan")),
    "1e300 test samples": with_metrics(num_examples=1e300),
    "half a test sample and a figure": with_record(
        wire.METRICS, MetricRecord({"num-examples": 0.5, "loss": 1.0, "error": 0.5, "own": 1.0})
    ),
    "metrics that forge a line": with_record(
        wire.METRICS, MetricRecord({"num-examples": 1, "\x1b[2J": 1.0})
    ),
}

TABLE: dict[tuple[str, str], Behaviour] = {
    **{
        (kind, name): behaviour
        for kind in (wire.DESCRIBE, wire.INITIAL, wire.TRAIN, wire.EVALUATE)
        for name, behaviour in ANYWHERE.items()
    },
    **{(wire.TRAIN, name): behaviour for name, behaviour in TRAINING.items()},
    **{(wire.DESCRIBE, name): behaviour for name, behaviour in DESCRIBING.items()},
    **{(wire.INITIAL, name): behaviour for name, behaviour in INITIAL.items()},
    **{(wire.EVALUATE, name): behaviour for name, behaviour in EVALUATING.items()},
}
"""(Message type, what it does) → how."""


def answered(answer: Answer, message: Message) -> Message:
    """As a message; what raises and what is silent is not a message."""
    assert isinstance(answer, RecordDict | Error)
    return Message(answer, reply_to=message)
