"""What ``coterie silo export`` writes is used where there is no coterie, and answers as predict."""

from __future__ import annotations

import csv
import importlib.util
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from coterie.client.cli import export as exporting
from coterie.client.cli.predict import predict
from coterie.client.home.folder import create
from coterie.client.work.card import read_card
from coterie.tasks import load_task
from coterie.tasks.base import SiloData, leaves
from tests.conftest import silo
from tests.kit import run
from tests.unit.client import asked

pytestmark = pytest.mark.xdist_group("test_export")  # the first export of a worker takes seconds
PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "use-elsewhere.md"
KINDS = [
    asked.TwoClasses, asked.TwoLabels, asked.TwoNumbers, asked.Lives, asked.Pixels, asked.Voxels,
    asked.Nested,
]  # fmt: skip
WITHOUT_COTERIE = """
import sys
class Gone:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("coterie", "tests"):
            raise ImportError(name + " is not here")
sys.meta_path.insert(0, Gone())
try:
    import coterie
except ImportError:
    pass
else:
    raise SystemExit("coterie can be imported")
"""
ASK_ALL = """
import json, numpy as np
from pathlib import Path
for folder in Path(".").iterdir():
    inputs = dict(np.load(folder / "x.npz"))
    if (folder / "m.onnx").exists():
        import onnxruntime
        session = onnxruntime.InferenceSession(folder / "m.onnx")
        answers = session.run(None, inputs)[0]
        card = session.get_modelmeta().custom_metadata_map["coterie-card"]
        names = [entry["name"] for entry in json.loads(card)["inputs"]]
        assert [given.name for given in session.get_inputs()] == names
    else:
        import torch
        extra = {"coterie-card": ""}
        program = torch.export.load(folder / "m.pt2", extra_files=extra).module()
        given = {name: torch.from_numpy(array) for name, array in inputs.items()}
        if "x" not in given:
            given["x"] = {"numbers": given["x.numbers"], "more": [given["x.more.0"]]}
        answers, card = program(given["x"]).numpy(), extra["coterie-card"]
    np.save(folder / "answers.npy", answers)
    (folder / "card.json").write_text(card)
"""


def run_without_coterie(code: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-I", "-c", WITHOUT_COTERIE + code],
        cwd=folder, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def exported(home: Path, file: Path, *more: str) -> dict[str, Any]:
    """Export with the command; return the card beside the file."""
    assert silo(["export", "--home", str(home), "--output", str(file), *more]) == 0
    card: dict[str, Any] = json.loads(file.with_name(file.name + ".json").read_text("utf-8"))
    return card


@pytest.mark.nightly
@pytest.mark.parametrize("ending", ["onnx", "pt2"])
def test_every_kind_of_model_answers_without_coterie_as_predict_does(
    ending: str, tmp_path: Path
) -> None:
    away = tmp_path / "away"
    expected, cards = {}, {}
    for kind in KINDS:
        home, folder, name = tmp_path / kind.__name__, away / kind.__name__, kind.__name__
        file = asked.keep(home, kind)
        if kind in (asked.TwoClasses, asked.TwoLabels):
            assert silo(["calibrate", "--home", str(home)]) == 0
        cards[name] = exported(home, folder / f"m.{ending}")
        expected[name] = predict(file, None, options={}).values
        data = kind().load({})
        assert isinstance(data, SiloData)
        names = [entry["name"] for entry in cards[name]["inputs"]]
        np.savez(folder / "x.npz", **dict(zip(names, leaves(data.x_test), strict=True)))
    run_without_coterie(ASK_ALL, away)
    for name, values in expected.items():
        got = np.load(away / name / "answers.npy")
        np.testing.assert_allclose(got, values, rtol=1e-4, atol=1e-5)
        inside = json.loads((away / name / "card.json").read_text())
        assert inside == {k: v for k, v in cards[name].items() if k != "sha256"}
        assert list(got.shape[1:]) == inside["output"]["shape"][1:]
        assert str(got.dtype) == inside["output"]["dtype"]
    assert cards["TwoClasses"]["output"]["temperature"] > 1.5
    assert cards["TwoNumbers"]["output"]["unit"] == "days"


def test_the_card_says_how_to_decide_and_how_good_the_model_is(tmp_path: Path) -> None:
    file = asked.keep(tmp_path, asked.TwoClasses)
    plain = exported(tmp_path, tmp_path / "m.pt2")
    kept = read_card(file)
    assert (plain["calibration"], plain["output"]["thresholds"]) == (None, [])
    assert plain["output"]["decide"] == "the class with the highest probability"
    assert plain["output"]["classes"] == ["healthy", "ill"]
    assert plain["measured"]["samples"] == 60
    assert plain["measured"]["trivial"]["auroc"] == kept.trivial["auroc"]
    assert "| 95% interval | trivial |" in (tmp_path / "m.pt2.md").read_text("utf-8")
    value, low, high = kept.figures["auroc"]
    assert plain["measured"]["figures"]["auroc"] == {"value": value, "low": low, "high": high}
    assert silo(["calibrate", "--home", str(tmp_path), "--sensitivity", "0.9"]) == 0
    card, own = exported(tmp_path, tmp_path / "m.pt2"), read_card(file).calibration
    assert own is not None
    assert card["output"]["thresholds"] == list(own.thresholds)
    assert card["output"]["temperature"] == own.temperature
    assert f"'ill' if its probability is above {own.thresholds[0]!r}" in card["output"]["decide"]
    assert (card["calibration"], card["measured"]["samples"]) == (own.text(), 30)
    text = (tmp_path / "m.pt2.md").read_text("utf-8")
    assert "trivial" not in card["measured"] and "trivial" not in text
    (row,) = (line for line in text.splitlines() if line.startswith("| AUROC "))
    assert row.count("|") == 4
    expected = (
        own.text(),
        "may contain traces",
        "batch, 3",
        "AUROC",
        card["sha256"],
        "healthy, ill",
    )
    for said in expected:
        assert said in text


@pytest.mark.parametrize("ending", ["onnx", "pt2"])
def test_neither_samples_nor_places_on_this_machine_are_in_the_file(
    ending: str, tmp_path: Path
) -> None:
    asked.keep(tmp_path, asked.TwoClasses)
    file = tmp_path / f"m.{ending}"
    exported(tmp_path, file)
    if ending == "pt2":
        with zipfile.ZipFile(file) as opened:
            content = b"".join(opened.read(name) for name in opened.namelist())
    else:
        content = file.read_bytes()
    data = asked.TwoClasses().load({})
    assert isinstance(data, SiloData)
    weights = load_file(next(tmp_path.glob("models/*.safetensors")))
    assert np.ascontiguousarray(weights["weight"]).tobytes() in content, "would be found"
    for value in [*data.x_test[:8].ravel(), *data.x_train[:8].ravel()]:
        assert value.tobytes() not in content
    for place in (str(Path.cwd()), str(tmp_path), "asked.py", "site-packages"):
        assert place.encode() not in content


@pytest.fixture(scope="module")
def hospital(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A silo with a table, after a run and a calibration."""
    root = tmp_path_factory.mktemp("hospital")
    (root / "study.toml").write_text(
        'kind = "table"\nname = "study"\ntarget = "ill"\nclasses = ["no", "yes"]\n'
        'numeric = ["age", "bmi"]\nindicators = ["bmi"]\nnetwork = "mlp-64"\n'
        '[categorical]\nsex = ["f", "m"]\n'
    )
    draw = np.random.default_rng(0)
    lines = ["age,bmi,sex,ill"]
    for number in range(200):
        age, bmi, sex = draw.normal(60, 9), draw.normal(27, 4), draw.integers(2)
        bmi = "" if number % 5 == 0 else f"{bmi:.1f}"
        ill = (age - 60) / 9 + sex - 0.5 + draw.normal() > 0
        lines.append(f"{age:.1f},{bmi},{'fm'[sex]},{'yes' if ill else 'no'}")
    (root / "own.csv").write_text("\n".join(lines) + "\n")
    home = create(root / "a", "a", task=str(root / "study.toml"), data=root / "own.csv")
    run(root / "runs" / "run-1", [home.settings().to_node_config()], task="study")
    assert silo(["calibrate", "--home", str(home.folder)]) == 0
    return root


@pytest.mark.nightly
def test_the_page_s_code_needs_nothing_but_file_and_card(hospital: Path, tmp_path: Path) -> None:
    away = tmp_path / "away"
    for ending in ("onnx", "pt2"):
        exported(hospital / "a", away / f"model.{ending}")
    (away / "patients.csv").write_text("sex,bmi,age\nf,31,50\nm,,72.5\nx,20,60\nm,24,91\n")
    out = tmp_path / "out.csv"
    asking = ["predict", "--home", str(hospital / "a"), "--output", str(out)]
    assert silo([*asking, "--input", str(away / "patients.csv")]) == 0
    blocks = re.findall(
        r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE
    )
    keep = "np.save('onnx.npy', onnx)\nnp.save('torch.npy', probabilities)\n"
    said = run_without_coterie(blocks[0] + "onnx = probabilities\n" + blocks[1] + keep, away)
    rows = list(csv.DictReader(out.open()))
    assert [line.split()[0] for line in said.splitlines()] == [row["class"] for row in rows]
    expected = [[float(row["p_no"]), float(row["p_yes"])] for row in rows]
    for file in ("onnx.npy", "torch.npy"):
        np.testing.assert_allclose(np.load(away / file), expected, atol=1e-5)


def test_a_model_is_exported_when_the_data_is_away(
    hospital: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card = exported(hospital / "a", tmp_path / "m.pt2", "--set", "data=/nowhere")
    assert (
        "8 samples generated, because the silo's data are not available" in capsys.readouterr().err
    )
    assert card["inputs"] == [{"name": "x", "shape": ["batch", 5], "dtype": "float32"}]
    columns = card["preparation"]["columns"]
    assert [c["column"] for c in columns] == ["age", "bmi", "sex", "sex", "bmi"]
    scale = read_card(hospital / "a" / "models" / "run-1.safetensors").scale
    assert scale is not None
    assert [[c["mean"], c["deviation"]] for c in columns[:2]] == [list(row) for row in scale]


@pytest.mark.parametrize(
    ("channels", "normalise"), [(1, "symmetric"), (3, "unit"), (3, "0.5,0.4,0.3/0.2,0.3,0.25")]
)
def test_what_is_said_of_images_is_what_is_done(
    channels: int, normalise: str, tmp_path: Path
) -> None:
    (tmp_path / "study.toml").write_text(
        f'kind = "image-folder"\nname = "study"\nclasses = ["a", "b"]\nnetwork = "mclr"\n'
        f'shape = [{channels}, 4, 6]\nnormalise = "{normalise}"\n'
    )
    size = (4, 6) if channels == 1 else (4, 6, 3)
    pixels = np.random.default_rng(0).integers(0, 256, size).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "one.png")
    task = load_task(str(tmp_path / "study.toml"))
    how = json.loads(json.dumps(task.prepared({})))
    made = (pixels - np.array(how["shift"])) / np.array(how["width"])
    by_hand = made[None] if channels == 1 else made.transpose(2, 0, 1)
    assert how["size"].startswith("4 × 6 ") and how["axes"] == "channels, height, width"
    assert how["colour"] == ("grey" if channels == 1 else "red, green, blue")
    np.testing.assert_allclose(task.inputs(tmp_path / "one.png", {}).x[0], by_hand, atol=1e-5)


def test_what_cannot_be_exported_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(name: str) -> str:
        assert silo(["export", "--home", str(tmp_path), "--output", str(tmp_path / name)]) == 2
        assert not (tmp_path / name).exists()
        return capsys.readouterr().err

    asked.keep(tmp_path, asked.TwoNumbers)
    assert "must end in .onnx, .pt2, .json (ONNX, torch.export, JSON of" in refused("m.pt")
    assert ".json is the format of XGBoost, for boosted trees" in refused("m.json")
    found = importlib.util.find_spec
    monkeypatch.setattr(
        exporting, "find_spec", lambda name: None if name == "onnxscript" else found(name)
    )
    assert "onnxscript must be installed: pip install 'coterie[export]'" in refused("m.onnx")
    monkeypatch.setattr(exporting, "_torch", lambda *_: (b"", lambda x: x.numpy()[:, :2] + 1))
    assert "answers differ from the model's" in refused("m.pt2")
    monkeypatch.undo()
    asked.keep(tmp_path, asked.Branching)
    assert "forward must not depend on the values of its inputs" in refused("m.pt2")
