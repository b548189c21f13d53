"""The documentation's examples work as written, and its tables are the code's."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from coterie.client.app import app
from coterie.server.runs.config import RunConfig
from coterie.server.runs.inprocess import InProcessGrid
from coterie.server.runs.run import execute
from coterie.tasks import TaskError, load_task

ROOT = Path(__file__).parents[1]


def test_the_task_of_the_guide_runs_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    (tmp_path / "blobs.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    configs = []
    for silo in range(3):
        rng = np.random.default_rng(silo)
        y = rng.integers(0, 2, 60)
        x = rng.standard_normal((60, 2)) + 4 * y[:, None]
        np.savez(tmp_path / f"{silo}.npz", x=x, y=y)
        data = {"data.data": str(tmp_path / f"{silo}.npz")}
        configs.append({"name": f"silo-{silo}", "task": "blobs:Blobs", "threads": 1, **data})
    config = RunConfig.read({"task": "blobs:Blobs", "rounds": 3, "min-silos": 3})
    result = execute(InProcessGrid(app, configs), config, run_id=1, folder=tmp_path / "run")
    errors = [error for _, error, _ in result.rounds[-1].evaluation.values()]
    assert max(errors) < 0.2
    with pytest.raises(TaskError, match=r"must be a \.npz file"):
        load_task("blobs:Blobs").load({"data": str(tmp_path / "none.npz")})
    sys.modules.pop("blobs", None)


def test_the_table_of_keys_is_the_code_s() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert RunConfig.table() in text


@pytest.mark.parametrize(
    "page", ["README.md", *sorted(p.name for p in (ROOT / "docs").glob("*.md"))]
)
def test_links_lead_somewhere(page: str) -> None:
    file = ROOT / page if page == "README.md" else ROOT / "docs" / page
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", file.read_text(encoding="utf-8")):
        assert (file.parent / target).exists(), f"{page} links to {target}"
