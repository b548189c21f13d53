"""Export of a saved model for use without coterie: ``coterie silo export``.

It writes an ONNX file, a program of ``torch.export``, or boosted trees as XGBoost's JSON, and a
card for programs (JSON) and people (Markdown): the inputs, the outputs, and the model's metrics.
The first two also contain the card. The written file is read again and must give the model's
answers for some samples.
"""

from __future__ import annotations

import hashlib
import io
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from coterie.client.cli.answers import Array, names_of
from coterie.client.cli.export_trees import xgboost_json
from coterie.client.cli.predict import Kept, answer_of
from coterie.client.work.card import Card, figure_row, lead_of, numbers_of
from coterie.client.work.data import map_nest, to_device
from coterie.system.files import make_folder, write_named
from coterie.system.terminal import LEGIBLE
from coterie.tasks.base import Nest, Option, TaskError, leaves
from coterie.tasks.problems import Classes, Labels, Masks, Numbers, Problem
from coterie.tasks.trees import Trees
from coterie.wire import counted

CARD = "coterie-card"
"""The card's name in the file's metadata."""
CHECKED = 8
"""Samples used to check the written file."""
XGBOOST = ".json"
FORMATS = {".onnx": "ONNX", ".pt2": "torch.export", XGBOOST: "JSON of XGBoost"}
"""Ending of a file → its format."""
LARGEST = 2**31 - 2**20
"""The largest ONNX file in bytes, a limit of protobuf."""
TRACES = (
    "The model may contain traces of its training data, from this silo and from the silos of "
    "its group. Share it only as they agreed."
)


@dataclass(frozen=True)
class Exported:
    """The files of an export, and the result of their check.

    Attributes:
        checked: number of samples used for the check; 0 if xgboost, which would read the file, is
            not installed.
        own: whether they are from the silo's test data, not made up.
        apart: the largest difference between an answer of the file and of the model.
    """

    files: Sequence[Path]
    checked: int
    own: bool
    apart: float


class Program(nn.Module):
    """The model with the conversion of its outputs to answers, as in ``coterie silo predict``."""

    def __init__(self, kept: Kept) -> None:
        super().__init__()
        calibration = kept.card.calibration
        self.model = kept.model
        self.problem = kept.task.problem
        self.temperature = 1.0 if calibration is None else calibration.temperature

    def forward(self, x: Nest) -> torch.Tensor:
        return answer_of(self.problem, self.model(x), self.temperature)


def export(kept: Kept, file: Path, *, options: Mapping[str, Option]) -> Exported:
    """Write a saved model, in one of ``FORMATS``, and its cards, ``FILE.json`` and ``FILE.md``.

    If the data in ``options`` exist, some of the silo's test samples are used to check the file.

    Raises:
        TaskError: the file's name ends in something else, a package is missing, the model cannot be
            written in this format, or the written file answers differently.
    """
    suffix = file.suffix.lower()
    if suffix not in FORMATS:
        raise TaskError(
            f"the file to write must end in {', '.join(FORMATS)} ({', '.join(FORMATS.values())}). "
            f"Got {file.name!r}."
        )
    samples, own = _some_samples(kept, options)
    program = Program(kept).eval().requires_grad_(False)
    card = card_of(kept, file, samples, options)
    if suffix == XGBOOST:
        content, ask = _xgboost(kept, program.temperature)
    else:
        traced, shapes = _traced(kept, program, samples)
        content, ask = (_onnx if suffix == ".onnx" else _torch)(traced, card, shapes)
    apart = 0.0 if ask is None else _difference(program, ask, samples)
    card |= {"sha256": hashlib.sha256(content).hexdigest()}
    files = [file, file.with_name(file.name + ".json"), file.with_name(file.name + ".md")]
    make_folder(file.parent)
    texts = [json.dumps(card, indent=2, ensure_ascii=False), _text(kept, card)]
    contents = [content, *(text.encode(errors=LEGIBLE) for text in texts)]
    for place, written in zip(files, contents, strict=True):
        write_named(place, written)
    return Exported(files, 0 if ask is None else len(leaves(samples)[0]), own, apart)


def _traced(kept: Kept, program: Program, samples: Nest) -> tuple[Any, Any]:
    """Return the program of ``torch.export``, and the shapes that may vary."""
    # Zeros: a program of torch.export keeps its example, which must be no patient's.
    example = map_nest(lambda leaf: leaf.new_zeros((2, *leaf.shape[1:])), samples)
    batch = torch.export.Dim("batch")
    shapes = (map_nest(lambda leaf: {0: batch}, samples),)
    try:
        traced = torch.export.export(program, (example,), dynamic_shapes=shapes)
    except Exception as error:  # torch.export raises all sorts of things
        raise TaskError(
            f"the model of task {kept.task.name!r} cannot be exported as one program: "
            f"{_first_line(error)}. Its forward must not depend on the values of its inputs, or "
            "on how many samples there are."
        ) from None
    _forget_source(traced)
    return traced, shapes


def card_of(kept: Kept, file: Path, samples: Nest, options: Mapping[str, Option]) -> dict[str, Any]:
    """Return the card for programs that use the file, as JSON values.

    Of ``samples``, a nest of tensors (n, …), only the shapes are used.
    """
    card, task = kept.card, kept.task
    inputs = [
        {"name": name, "shape": ["batch", *leaf.shape[1:]], "dtype": _dtype(leaf)}
        for name, leaf in zip(_names(samples), leaves(samples), strict=True)
    ]
    with torch.no_grad():
        said = Program(kept).eval()(map_nest(lambda leaf: torch.zeros_like(leaf[:1]), samples))
    output = {
        "name": _output_name(task.problem),
        "shape": ["batch", *said.shape[1:]],
        "dtype": _dtype(said),
        **_meaning(kept, said.shape[1] if said.ndim > 1 else 1),
    }
    if file.suffix.lower() == XGBOOST and isinstance(task.problem, Classes) and said.shape[1] == 2:
        means = f"probability of {output['classes'][1]!r}"
        output |= {"shape": ["batch"], "means": means}
    calibration = card.calibration
    where, number, figures = "", card.test_examples, _figures_of(card)
    trivial = {"trivial": {name: _or_none(value) for name, value in card.trivial.items()}}
    if calibration is not None:
        where, trivial = " not used for calibration", {}  # it is that on all test data
        number, figures = calibration.measured, calibration.figures
    return {
        "file": file.name,
        "format": FORMATS[file.suffix.lower()],
        "task": card.task,
        "silo": card.silo,
        "run": card.run,
        "strategy": card.strategy,
        "trained": "alone" if card.alone else card.trained,
        "kept": card.kept,
        "sha256-of-arrays": card.sha256,
        "versions": {**card.versions, "torch": torch.__version__},
        "inputs": inputs,
        "preparation": dict(task.prepared(options)),
        "output": output,
        **({"importance": dict(card.importance)} if card.importance else {}),
        "calibration": None if calibration is None else calibration.text(),
        "measured": {
            "on": f"test data of silo {card.silo}{where}",
            "samples": number,
            "figures": {
                name: dict(zip(("value", "low", "high"), map(_or_none, figure), strict=True))
                for name, figure in figures.items()
            },
            **trivial,
        },
        "traces": TRACES,
    }


def _figures_of(card: Card) -> Mapping[str, tuple[float, float, float]]:
    """Return the card's figures; only the primary metric if the model was not measured in full."""
    unknown = float("nan")
    value = lead_of(card).shortfall(card.test_error)
    return card.figures or {card.metric: (value, unknown, unknown)}


def _or_none(number: float) -> float | None:
    """Return None for NaN, which JSON lacks."""
    return number if np.isfinite(number) else None


def _output_name(problem: Problem) -> str:
    if isinstance(problem, Classes | Labels):
        return "probabilities"
    if isinstance(problem, Masks):
        return "mask"
    return "values" if isinstance(problem, Numbers) else "log_risk"


def _meaning(kept: Kept, width: int) -> dict[str, Any]:
    problem, calibration = kept.task.problem, kept.card.calibration
    names = names_of(kept.task, width)
    thresholds = [] if calibration is None else list(calibration.thresholds)
    temperature = 1.0 if calibration is None else calibration.temperature
    if isinstance(problem, Classes):
        rule = "the class with the highest probability"
        if thresholds:
            rule = f"{names[1]!r} if its probability is above {thresholds[0]!r}, else {names[0]!r}"
        how = {"thresholds": thresholds, "temperature": temperature}
        return {"means": "probability of every class", "classes": names, "decide": rule, **how}
    if isinstance(problem, Labels):
        thresholds = thresholds or [0.5] * width
        rule = "a label is present if its probability is above its threshold"
        how = {"thresholds": thresholds, "temperature": temperature}
        return {"means": "probability of every label", "labels": names, "decide": rule, **how}
    if isinstance(problem, Numbers):
        return {"means": "the targets", "targets": names, "unit": problem.unit}
    if isinstance(problem, Masks):
        names = names_of(kept.task, problem.num_classes)
        return {
            "means": "number of the class of every pixel; 0 is the background",
            "classes": names,
        }
    return {"means": "log risk: the higher, the earlier the event; it has no unit"}


def _some_samples(kept: Kept, options: Mapping[str, Option]) -> tuple[Nest, bool]:
    """Return a few samples for tracing and checking, and whether they are test data."""
    try:
        part = to_device(kept.task.load(options), torch.device("cpu")).test
    except TaskError:
        shape = getattr(kept.task, "shape", None)  # of a declared task
        if not isinstance(shape, tuple):
            raise
        draw = torch.Generator().manual_seed(0)
        return torch.randn(CHECKED, *shape, generator=draw), False
    return part.at(torch.arange(min(CHECKED, len(part))))[0], True


_Ask = Callable[[Nest], Array]


def _xgboost(kept: Kept, temperature: float) -> tuple[bytes, _Ask | None]:
    """Return the file, and a function that runs it; None if xgboost is not installed."""
    if not isinstance(kept.model, Trees):
        raise TaskError(
            f'{XGBOOST} is the format of XGBoost, for boosted trees (network = "trees"). Write '
            "other models as .onnx or .pt2."
        )
    content = xgboost_json(kept.model, kept.task.problem, temperature)
    if find_spec("xgboost") is None:
        return content, None
    import xgboost

    booster = xgboost.Booster()
    booster.load_model(bytearray(content))

    def ask(x: Nest) -> Array:
        assert isinstance(x, torch.Tensor), "rows of a table"
        found: Array = booster.predict(xgboost.DMatrix(x.numpy()))
        if isinstance(kept.task.problem, Classes) and found.ndim == 1:
            return np.stack([1 - found, found], axis=1)
        return found.reshape(len(x), -1)

    return content, ask


def _torch(traced: Any, card: Mapping[str, Any], shapes: Any) -> tuple[bytes, _Ask]:
    content = io.BytesIO()
    torch.export.save(traced, content, extra_files={CARD: json.dumps(card)})
    read = torch.export.load(io.BytesIO(content.getvalue())).module()
    return content.getvalue(), lambda x: read(x).numpy()


def _onnx(traced: Any, card: Mapping[str, Any], shapes: Any) -> tuple[bytes, _Ask]:
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]
    if missing:
        raise TaskError(
            f"to write ONNX, {' and '.join(missing)} must be installed: pip install "
            "'coterie[export]'. A .pt2 file needs no further package."
        )
    import onnxruntime

    names = [entry["name"] for entry in card["inputs"]]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the exporter about itself
            made = torch.onnx.export(
                traced,
                input_names=names,
                output_names=[card["output"]["name"]],
                dynamic_shapes=shapes,
                dynamo=True,
                verbose=False,
            )
        assert made is not None
        made.model.metadata_props[CARD] = json.dumps(card)
        content: bytes = made.model_proto.SerializeToString()
        if len(content) > LARGEST:
            raise ValueError(f"it has {len(content):,} bytes; the limit is {LARGEST:,}")
        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    except Exception as error:  # of the exporter, protobuf and the runtime
        raise TaskError(
            f"the model cannot be written as ONNX: {_first_line(error)}. Try a .pt2 file."
        ) from None

    def ask(x: Nest) -> Array:
        fed = {name: leaf.numpy() for name, leaf in zip(names, leaves(x), strict=True)}
        answers: Array = session.run(None, fed)[0]
        return answers

    return content, ask


def _forget_source(traced: Any) -> None:
    """Remove the source locations on this machine from the program."""
    for node in traced.graph.nodes:
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "from_node"):
            node.meta.pop(key, None)


def _difference(program: nn.Module, ask: _Ask, samples: Nest) -> float:
    """Return the largest difference between the file's answers and the model's.

    More than rounding raises ``TaskError``.
    """
    largest = 0.0
    for x in (samples, map_nest(lambda leaf: leaf[:1], samples)):
        expected, got = program(x).numpy(), ask(x)
        if expected.dtype.kind == "i":  # two scores that are equal but for rounding may swap
            same = expected.shape == got.shape and float((expected == got).mean()) > 0.999
        else:
            same = expected.shape == got.shape and np.allclose(expected, got, rtol=1e-3, atol=1e-4)
        if not same:
            raise TaskError(
                "the exported file's answers differ from the model's, so it was deleted. Try "
                "the other format (.onnx or .pt2)."
            )
        largest = max(largest, float(np.abs(expected - got).max()))
    return largest


def _names(nest: Nest, path: str = "x") -> list[str]:
    """Return the names of the inputs' leaves: ``x``, or ``x.key`` and ``x.0``."""
    if isinstance(nest, dict):
        return [name for key, inner in nest.items() for name in _names(inner, f"{path}.{key}")]
    if isinstance(nest, list | tuple):
        return [name for i, inner in enumerate(nest) for name in _names(inner, f"{path}.{i}")]
    return [path]


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")


def _text(kept: Kept, card: Mapping[str, Any]) -> str:
    """Return the card for people: its parts as lists, rows and figures as tables."""
    calibration, columns = kept.card.calibration, ["metric", "value", "95% interval"]
    plain = calibration is None
    figured = _figures_of(kept.card) if calibration is None else calibration.figures
    figures = [figure_row(kept.card, *entry, trivial=plain) for entry in figured.items()]
    columns += ["trivial"] if plain else []
    parts = {"What goes in": card["inputs"], "How it is prepared": card["preparation"]}
    parts |= {"What comes out": card["output"]}
    about = {key: value for key, value in card.items() if not isinstance(value, dict | list)}
    if kept.card.scaled:
        about["traces"] += f" This card contains mean and deviation of {numbers_of(kept.card)}."
    if not card["preparation"]:
        how = f"The code of task {card['task']} prepares samples; it is not part of this file."
        parts["How it is prepared"] = {"by": how}
    lines = [f"# {card['file']}: model of task {card['task']}\n", *_lines(about)]
    for title, value in parts.items():
        lines += [f"\n## {title}\n", *_lines({"": value} if isinstance(value, list) else value)]
    measured = card["measured"]
    lines += [
        "\n## How good it is\n",
        f"Measured on {counted(measured['samples'], 'sample')}: {measured['on']}.\n",
        f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}",
        *figures,
    ]
    return "\n".join([*lines, ""])


def _lines(values: Mapping[str, Any]) -> list[str]:
    """Return lists of rows as tables, the rest as a list."""
    told = {key: value for key, value in values.items() if not _rows(value)}
    lines = [
        f"- {key}: {_short(value)}" for key, value in told.items() if value not in ([], "", None)
    ]
    for rows in (value for value in values.values() if _rows(value)):
        columns = list(dict.fromkeys(key for row in rows for key in row))
        lines += ["", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        lines += [f"| {' | '.join(_short(row.get(c)) for c in columns)} |" for row in rows]
    return lines


def _rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _short(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(_short(one) for one in value)
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else str(value).replace("|", "\\|")
