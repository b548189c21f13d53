"""Files from elsewhere: a model whose card names code, and files that grow when they are read."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.lib import format as npy
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from coterie import wire
from coterie.client.home.settings import SettingsError
from coterie.client.work.card import read_card
from coterie.tasks import TaskError, load_task
from coterie.tasks.base import read_array
from coterie.tasks.images.image_files import PARTS, read_npz
from coterie.tasks.toml import table_of
from tests.conftest import digits_config, silo
from tests.kit import answer, initial

BOMB = 1 << 44
"""Bytes of an array that no machine has."""


def foreign(folder: Path, **card: Any) -> Path:
    """Return a model that a silo has kept, with another card."""
    node = digits_config("a", home=str(folder / "a"), **{"data.train": 20, "data.test": 10})
    settings = {"keep": True, "server_round": 1, "rounds": 1, "run": "north", "seed": 0}
    answer(wire.EVALUATE, node, model=initial(), **settings)
    kept, file = folder / "a" / "models" / "north.safetensors", folder / "foreign.safetensors"
    with safe_open(kept, framework="np") as opened:
        ((key, text),) = opened.metadata().items()
    save_file(load_file(kept), file, {key: json.dumps(json.loads(text) | card)})
    return file


@pytest.mark.parametrize("source", ["os:abort", "digits:x", "heart.toml", "/tmp/x.toml", "os"])
@pytest.mark.parametrize("command", ["predict", "export"])
def test_a_foreign_model_chooses_no_code(
    command: str, source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = foreign(tmp_path, source=source)
    (tmp_path / "empty").mkdir()
    more = ["-o", str(tmp_path / "m.onnx")] if command == "export" else []
    asked = [command, "--model", str(file), "--home", str(tmp_path / "empty"), *more]
    assert silo(asked) == 2
    assert f"names the task '{source}', which is not coterie's own" in " ".join(
        capsys.readouterr().err.split()
    )


def npz(file: Path, shapes: dict[str, tuple[int, ...]]) -> Path:
    """Write arrays that have headers and next to no content."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, shape in shapes.items():
            head = io.BytesIO()
            said = {"descr": "<f8", "fortran_order": False, "shape": shape}
            npy.write_array_header_1_0(head, said)
            packed.writestr(f"{name}.npy", head.getvalue() + bytes(800))
    return file


def test_arrays_are_added_up_before_one_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coterie.tasks.npy.room", lambda: BOMB)
    monkeypatch.setattr(np, "load", None)
    part = BOMB // 8 // 8  # numbers: each an eighth, six together more than half
    file = npz(tmp_path / "x.npz", {f"x{i}": (part, 1) for i in range(6)})
    with pytest.raises(TaskError, match=r"its arrays have 13,194\.1 GB and need 2 times as much"):
        read_array(file)
    (tmp_path / "arrays.toml").write_text(
        'kind = "npz"\nname = "n"\nshape = [4]\nclasses = ["a", "b"]\nnetwork = "mclr"\n'
    )
    task = load_task(str(tmp_path / "arrays.toml"))
    with pytest.raises(TaskError, match="its arrays have 13,194"):
        task.load({"data": str(file)})
    images = npz(tmp_path / "i.npz", dict.fromkeys(PARTS, (BOMB // 8 // 6, 2)))
    with pytest.raises(TaskError, match="its arrays have"):
        read_npz(images)


def test_arrays_that_fit_are_read(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "x.npz", x=np.arange(6.0).reshape(2, 3))
    np.save(tmp_path / "x.npy", np.arange(6.0))
    assert read_array(tmp_path / "x.npz").shape == (2, 3)
    assert read_array(tmp_path / "x.npy").shape == (6,)


def test_content_nested_too_deeply_is_refused_with_the_reason(tmp_path: Path) -> None:
    deep = "[" * 100_000 + "]" * 100_000
    file = tmp_path / "model.safetensors"
    with safe_open(foreign(tmp_path), framework="np") as opened:
        (key,) = opened.metadata()
    save_file({"w": np.zeros(1)}, file, {key: deep})
    with pytest.raises(SettingsError, match="its card is nested too deeply"):
        read_card(file)
    with pytest.raises(ValueError, match=r"silo\.toml has arrays or tables nested too deeply"):
        table_of(f"x = {deep}", "silo.toml", ValueError)
