"""The documentation's examples work as written, its commands exist, its links lead somewhere."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import click
import nbformat
import numpy as np
import pytest
import yaml

from coterie.client.app import app
from coterie.client.home.folder import Home
from coterie.engine.inprocess import InProcessGrid
from coterie.server.report.command import write_report
from coterie.server.runs.config import RunConfig, defaults, keys_of
from coterie.server.runs.record import read_run
from coterie.server.runs.run import execute
from coterie.server.study.compare import read as read_comparison
from coterie.strategies.errors import FederationError
from coterie.strategies.registry import ROWS
from coterie.tasks import TaskError, load_task
from coterie.tasks.options import with_task_keys
from coterie.tasks.own.declared import load_declared
from coterie.tasks.simulation import Simulation
from tests.conftest import (
    plain_app,
    plain_app_without_answers,
    plain_initial,
    plain_model,
    plain_nodes,
)
from tests.rules.test_imports import OURS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
HOOKS: dict[str, Any] = runpy.run_path(str(DOCS / "hooks.py"))
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
WRITTEN = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
PAGES = [*WRITTEN, *NOTEBOOKS]
COMMANDS = ("sh", "bash")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: what stands after the fence, what is in it, and where it is."""

    page: Path
    language: str
    text: str
    line: int

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@cache
def text_of(page: Path) -> str:
    """A page's Markdown; a notebook's is that of its cells."""
    if page.suffix != ".ipynb":
        return page.read_text(encoding="utf-8")
    text: str = HOOKS["notebook_page"](nbformat.read(page, as_version=4), page.stem)[0]
    return text


def blocks(page: Path, *languages: str) -> list[Block]:
    """The fenced blocks of a page in these languages; all of them by default."""
    text = text_of(page)
    found = re.finditer(r"^```(\w*)[^\n]*\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    made = [Block(page, m[1], m[2], text[: m.start()].count("\n") + 1) for m in found]
    return [block for block in made if not languages or block.language in languages]


def pages_with(*languages: str) -> list[Any]:
    """Pages with such blocks, as parameters of a test."""
    return named(*(page for page in PAGES if blocks(page, *languages)))


LONG = {"python.md"}
"""Its code compares strategies over seeds: run by ``make nightly``."""


def named(*pages: Path) -> list[Any]:
    """Pages as parameters of a test, called by their place."""
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages]


# --- code that runs ---


def given_by_the_reader() -> dict[str, Any]:
    """What a page may use without making it: a federation that the reader has."""
    nodes = plain_nodes(0, 0, 1, 1)
    return {
        "client_app": plain_app(),
        "grid": InProcessGrid(plain_app_without_answers(), nodes),
        "arrays": plain_initial(),
        "make_model": plain_model,
        "__name__": "__main__",
    }


AWAY = {"use-elsewhere.md"}
"""Its code needs an exported model, and is run by ``tests/unit/client/test_export.py``."""


RUN = [p for p in WRITTEN if blocks(p, "python") and p.name not in AWAY]


@pytest.mark.parametrize(
    "page",
    [
        *named(*(page for page in RUN if page.name not in LONG)),
        *(
            pytest.param(page, id=page.name, marks=pytest.mark.nightly)
            for page in RUN
            if page.name in LONG
        ),
    ],
)
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COTERIE_RUNS", str(tmp_path / "runs"))
    space = given_by_the_reader()
    for block in blocks(page, "python"):
        exec(compile(block.text, str(block), "exec", dont_inherit=True), space)


def test_the_task_of_the_guide_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = blocks(DOCS / "how-to" / "own-task.md", "python")
    (tmp_path / "blobs.py").write_text(code.text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    configs = []
    for silo in range(3):
        rng = np.random.default_rng(silo)
        y = rng.integers(0, 2, 60)
        x = rng.standard_normal((60, 2)) + 4 * y[:, None]
        np.savez(tmp_path / f"{silo}.npz", x=x, y=y)
        data = {"data.data": str(tmp_path / f"{silo}.npz")}
        configs.append({"name": f"silo-{silo}", "task": "blobs:Blobs", "threads": 1, **data})
    keys = {"task": "blobs:Blobs", "strategy": "hcct", "rounds": 3, "min-silos": 3}
    config = RunConfig.read(keys)
    result = execute(InProcessGrid(app, configs), config, run_id=1, folder=tmp_path / "run")
    errors = [error for _, error, _ in result.rounds[-1].evaluation.values()]
    assert max(errors) < 0.2
    with pytest.raises(TaskError, match=r"must be a \.npz file"):
        load_task("blobs:Blobs").load({"data": str(tmp_path / "none.npz")})
    sys.modules.pop("blobs", None)


PROBLEMS = {"Stay": "mae", "Relapse": "concordance"}


@pytest.mark.parametrize(
    "strategy",
    [
        "hcct",
        *(
            pytest.param(one, marks=pytest.mark.nightly)
            for one in ("independent", "fedgroup", "fedcollab")
        ),
    ],
)
@pytest.mark.parametrize(
    "name",
    [one if one == "Relapse" else pytest.param(one, marks=pytest.mark.nightly) for one in PROBLEMS],
)
def test_the_learning_problems_of_the_guide_are_learned(
    name: str, strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = own_module(name, tmp_path, monkeypatch)
    keys = {"task": task, "strategy": strategy, "min-silos": 4, "rounds": 6, "batch-size": 30}
    more = {"num-groups": 2} if strategy == "fedgroup" else {}
    config = RunConfig.read({**keys, **more, "optimiser": "adamw", "lr": 0.02})
    configs = [{"name": f"silo-{i}", "task": task, "data.silo": i} for i in range(4)]
    result = execute(InProcessGrid(app, configs), config, run_id=1, folder=tmp_path / "run")
    first = next(r.evaluation for r in result.rounds if r.evaluation)
    last = result.rounds[-1]
    assert all(last.evaluation[n][1] < first[n][1] for n in first), "every silo has learned"
    run = read_run(tmp_path / "run")
    assert run.lead.metric == PROBLEMS[name] and run.final is not None
    figures = run.final.metrics["silo-0"]
    assert {PROBLEMS[name], f"{PROBLEMS[name]}-low", f"{PROBLEMS[name]}-high"} <= set(figures)
    assert run.unit == ("days" if name == "Stay" else "")
    (report,) = write_report(str(tmp_path / "run"))
    assert run.lead.title in report.read_text(encoding="utf-8")
    sys.modules.pop(task.split(":")[0], None)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"primary-metric": "auroc"}, "It has mae, rmse, r2 and loss"),
        (
            {"balance": "weights"},
            "balance = 'weights' cannot be used for task 'own_stay:Stay', which has no classes",
        ),
        ({"optimiser": "adamm"}, "optimiser must be one of"),
    ],
)
def test_what_a_problem_does_not_have_is_refused_before_anybody_trains(
    keys: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = own_module("Stay", tmp_path, monkeypatch)
    config = RunConfig.read({"task": task, "min-silos": 2, "wait-for-silos": 0.5, **keys})
    configs = [{"name": f"silo-{i}", "task": task, "data.silo": i} for i in range(2)]
    with pytest.raises(FederationError, match=said):
        execute(InProcessGrid(app, configs), config, run_id=1, folder=tmp_path / "run")
    sys.modules.pop(task.split(":")[0], None)


@pytest.mark.parametrize("strategy", ["fedgenp", "fedgen"])
def test_generators_refuse_what_has_no_classes(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = own_module("Stay", tmp_path, monkeypatch)
    config = RunConfig.read({"task": task, "strategy": strategy, "min-silos": 2, "rounds": 2})
    configs = [
        {"name": f"silo-{i}", "task": task, "data.silo": i, "label-counts": True} for i in range(2)
    ]
    with pytest.raises(FederationError, match=r"latent|classes"):
        execute(InProcessGrid(app, configs), config, run_id=1, folder=tmp_path / "run")
    sys.modules.pop(task.split(":")[0], None)


def own_module(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A task of the page about learning problems, where it can be imported."""
    page = blocks(DOCS / "how-to" / "learning-problems.md", "python")
    (code,) = (block for block in page if f"class {name}(" in block.text)
    assert len(code.text.splitlines()) <= 40
    (folder / f"own_{name.lower()}.py").write_text(code.text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    return f"own_{name.lower()}:{name}"


# --- files that the product reads ---


def read_as_the_product_does(text: str, folder: Path) -> str:
    """Read a TOML file with the reader of what it is; return what it was taken for."""
    table = tomllib.loads(text)
    file = folder / "file.toml"
    file.write_text(text, encoding="utf-8")
    if "strategies" in table:
        read_comparison(file)
        return "comparison"
    if "silos" in table:
        read = Simulation.read(file)
        RunConfig.read(read.run_keys())
        return "simulation"
    if "kind" in table:
        load_declared(file)
        return "declared task"
    file.rename(folder / "silo.toml")
    Home(folder).settings()
    return "silo.toml"


@pytest.mark.parametrize("page", pages_with("toml"))
def test_toml_is_what_the_product_reads(page: Path, tmp_path: Path) -> None:
    for number, block in enumerate(blocks(page, "toml")):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert read_as_the_product_does(block.text, folder)


def test_every_kind_of_file_is_shown_somewhere(tmp_path: Path) -> None:
    every = [block for page in PAGES for block in blocks(page, "toml")]
    kinds = set()
    for number, block in enumerate(every):
        (tmp_path / str(number)).mkdir()
        kinds.add(read_as_the_product_does(block.text, tmp_path / str(number)))
    assert kinds == {"comparison", "simulation", "declared task", "silo.toml"}


@pytest.mark.parametrize("wrong", ["silos = 2\nstrategy = 1", "kind = 'x'", "nam = 'x'"])
def test_a_wrong_file_would_be_found(wrong: str, tmp_path: Path) -> None:
    with pytest.raises((FederationError, TaskError, ValueError)):
        read_as_the_product_does(wrong, tmp_path)


def test_json_and_yaml_can_be_parsed() -> None:
    for page in PAGES:
        for block in blocks(page, "json"):
            json.loads(block.text)
        for block in blocks(page, "yaml"):
            yaml.safe_load(block.text)


def test_every_block_says_what_it_is() -> None:
    checked = {"python", "toml", "json", "yaml", "ini", "text", *COMMANDS}
    unnamed = [str(b) for page in PAGES for b in blocks(page) if b.language not in checked]
    assert not unnamed


# --- commands ---


def commands_in(page: Path) -> Iterator[str]:
    """Every command line of a page that calls ``coterie``, from blocks and from ``code``."""
    for block in blocks(page, *COMMANDS):
        for line in block.text.replace("\\\n", " ").splitlines():
            yield from re.findall(r"(?:^|[\s;&|(])(coterie\s[^;&|>]+)", line)
    text = re.sub(r"^```.*?^```$", "", text_of(page), flags=re.DOTALL | re.MULTILINE)
    yield from re.findall(r"`(coterie\s[^`]+)`", text.replace("\n", " "))


def problem_of(line: str, tree: click.Command) -> str:
    """What does not exist about a command line, or an empty text."""
    words = [word for word in shlex.split(line, comments=True)[1:] if word != "…"]
    command, path, keys = tree, "coterie", {}
    while words:
        word = words.pop(0)
        below = command.commands if isinstance(command, click.Group) else {}
        if word.startswith("-"):
            name = word.partition("=")[0]
            options = {o: p for p in command.params for o in [*p.opts, *p.secondary_opts]}
            if name in ("-h", "--help"):
                continue
            if name.startswith("--task."):  # the task at the silos knows it
                keys[name.removeprefix("--")] = words.pop(0)
                continue
            if name not in options:
                return f"{path} has no option {name}"
            option = options[name]
            if isinstance(option, click.Option) and not option.is_flag and words:
                value = words.pop(0)
                if name == "--set":
                    keys |= with_task_keys(tomllib.loads(_toml(value)))
        elif word in below:
            command, path = below[word], f"{path} {word}"
        elif below:
            return f"{path} has no command {word}"
        elif path == "coterie run" and word in ("resume", "continue"):
            words = words[1:]
        elif path == "coterie run":
            keys["strategy"] = word
    return _refusal(keys) if path == "coterie run" and "strategy" in keys else ""


def _toml(setting: str) -> str:
    """``lr=0.1`` and ``layers=auto`` as lines of TOML."""
    key, _, value = setting.partition("=")
    number = re.fullmatch(r"[\d.]+|true|false", value)
    return f"{key} = {value}" if number else f"{key} = {value!r}"


def _refusal(keys: dict[str, Any]) -> str:
    try:
        RunConfig.read(keys)
    except FederationError as error:
        return str(error)
    return ""


@cache
def commands() -> click.Command:
    """All of them, made once."""
    tree: click.Command = HOOKS["command_tree"]()
    return tree


@pytest.mark.parametrize("page", named(*PAGES))
def test_commands_exist(page: Path) -> None:
    tree = commands()
    problems = {line: problem_of(line, tree) for line in commands_in(page)}
    assert not {line: problem for line, problem in problems.items() if problem}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("coterie rnu hcct", "no command rnu"),
        ("coterie run hcct --alhpa 3", "no option --alhpa"),
        ("coterie silo serve --nmae north", "no option --nmae"),
        ("coterie silo ledgr", "no command ledgr"),
        ("coterie run hcct --set alhpa=3", "alhpa"),
        ("coterie run fedavg --set alpha=3", "alpha belongs to hcct"),
        ("coterie run hcct --set lr=-1", "lr"),
    ],
)
def test_a_wrong_command_would_be_found(line: str, said: str) -> None:
    assert said in problem_of(line, commands())


def test_commands_are_found_in_blocks_and_in_sentences() -> None:
    lines = list(commands_in(DOCS / "guide" / "approved-run.md"))
    assert {"coterie silo check --home north", "coterie silo pending"} <= {*map(str.strip, lines)}


# --- links and places ---


def test_links_lead_somewhere() -> None:
    made = {"changelog.md"}
    here = "https://github.com/coterie-fl/coterie/blob/main/"
    lost = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)", text_of(page)):
            local = target.removeprefix(here)
            if local.startswith(("https://", "http://")):
                continue
            where = ROOT / local if target.startswith(here) else page.parent / local
            if not where.exists() and where.name not in made:
                lost.append(f"{page.relative_to(ROOT)} → {target}")
    assert not lost


def test_pages_that_the_code_names_exist() -> None:
    folders = (*sorted(OURS), "docker")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*") if file.is_file()]
    named = {
        (str(file.relative_to(ROOT)), page)
        for file in [
            *files,
            ROOT / "compose.yaml",
            ROOT / "pyproject.toml",
            ROOT / "CONTRIBUTING.md",
        ]
        if file.suffix in (".py", ".md", ".yaml", ".toml", ".sh", "")
        for page in re.findall(r"docs/[\w/-]+\.md", file.read_text(encoding="utf-8"))
    }
    assert len(named) > 5
    assert not {(file, page) for file, page in named if not (ROOT / page).exists()}


def test_files_that_a_page_names_exist() -> None:
    folder = r"`((?:server|client|strategies|tasks|system|wire|benchmarks|docker|tests)/[\w/.-]+)`"
    named = {(p.name, n) for p in PAGES for n in re.findall(folder, text_of(p))}
    assert len(named) > 15
    assert not {(page, name) for page, name in named if not (ROOT / name).exists()}


# --- what is made ---


def test_the_page_of_the_configuration_has_every_key() -> None:
    page = (DOCS / "reference" / "configuration.md").read_text("utf-8")
    assert [key for key in defaults() if f"| `{key}` |" not in page] == []


def test_the_commands_page_has_every_command_and_option() -> None:
    page = HOOKS["commands_page"]()
    for path, command in HOOKS["walk"](commands()):
        assert f"## {path}\n" in page
        own = page.split(f"## {path}\n")[1].split("\n## ")[0]
        shown = [one for one in command.params if not getattr(one, "hidden", False)]
        assert all(f"`{name}`" in own for p in shown for name in p.opts if name[0] == "-")


def test_notebooks_are_stored_without_outputs() -> None:
    assert len(NOTEBOOKS) == 2
    for notebook in NOTEBOOKS:
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_the_site_is_built_without_a_warning_and_asks_no_other_host(tmp_path: Path) -> None:
    """This runs the notebooks as well, and MkDocs checks every link and anchor."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > len(PAGES)
    index = json.loads((tmp_path / "search" / "search_index.json").read_text(encoding="utf-8"))
    found = {entry["location"] for entry in index["docs"]}
    assert "index.html#who-am-i-with-and-why" in found
    assert not [place for place in found if place.startswith("reference/wire")]
    loads = re.compile(r"<(?:script|img|iframe|link)[^>]*\s(?:src|href)=[\"']?(?:https?:)?//")
    assert not [page for page in pages if loads.search(page.read_text(encoding="utf-8"))]
    for notebook in NOTEBOOKS:
        page = (tmp_path / "notebooks" / f"{notebook.stem}.html").read_text(encoding="utf-8")
        assert "<img" in page


def test_the_strategies_page_has_every_strategy_and_option() -> None:
    page = HOOKS["strategies_page"]()
    for row in ROWS:
        own = page.split(f"## {row.public}\n")[1].split("\n## ")[0]
        assert f"In files and on the command line: `{row.name}`." in own
        keys = [key for key in keys_of(row) if key.replace("-", "_") in row.load().model_fields]
        assert all(f"| `{key.replace('-', '_')}` |" in own for key in keys)
