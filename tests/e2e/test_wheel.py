"""The published form: an sdist, its wheel in a separate environment, far from the repository.

The user's folder holds modules called as coterie's parts are, which fail when they are imported;
it is the working directory and on PYTHONPATH, as docs/own-model.md says for a task of one's own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import distribution
from pathlib import Path

import pytest
import torch

from coterie.client.app import app
from coterie.engine.inprocess import InProcessGrid
from coterie.server.machine.link import control
from coterie.server.machine.local import SiloSpec
from coterie.server.machine.superlink import Ports
from coterie.server.runs.config import RunConfig
from coterie.server.runs.run import execute
from tests.e2e.runs import ROOT, finished, record_of, until

pytestmark = [pytest.mark.timeout(400), pytest.mark.xdist_group("wheel")]

PARTS = (
    *("client", "engine", "features", "pictures", "server", "strategies", "system", "tasks"),
    "wire",
)
BUILD = "import sys, setuptools.build_meta as b; b.build_{}(sys.argv[1])"
RAISES = "raise ImportError(\"this is the user's own module, not coterie's\")\n"
HELP = """
from typer.main import get_command
from typer.testing import CliRunner
from coterie.server.cli.main import app
def show(path, command):
    done = CliRunner().invoke(app, [*path, "--help"])
    assert done.exit_code == 0, done.output
    print("coterie", *path)
    for name, part in getattr(command, "commands", {}).items():
        show([*path, name], part)
show([], get_command(app))
"""
KEYS = {"strategy": "hcct", "rounds": 2, "seed": 5, "alpha": 20.0, "min-silos": 2}
OPTIONS = {"north": {"train": 40, "test": 30}, "south": {"train": 30, "test": 30, "skip": 70}}
SIMULATION = """
silos = 3
[split]
kind = "iid"
[run]
strategy = "fedavg"
rounds = 2
"""


@dataclass(frozen=True)
class User:
    """Somebody with a Python environment, who works in a folder that is not the repository."""

    bin: Path
    folder: Path
    flower_home: Path | None = None

    @property
    def environment(self) -> Mapping[str, str]:
        """With the folder on PYTHONPATH."""
        own = {"PYTHONPATH": str(self.folder), "COTERIE_HOME": str(self.folder / "home")}
        own["FLWR_HOME"] = str(self.flower_home or self.folder / "flwr")
        path = f"{self.bin}{os.pathsep}{os.environ['PATH']}"
        return {**os.environ, **own, "PATH": path, "FLWR_TELEMETRY_ENABLED": "0"}

    def run(self, program: str, *arguments: str) -> str:
        """Run a program of the environment in the folder; returns its standard output."""
        done = subprocess.run(
            [self.bin / program, *arguments],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a ``coterie`` that stays, with its log in the folder."""
        with (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                [self.bin / "coterie", *arguments],
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )


def build(what: str, source: Path, into: Path) -> Path:
    """An sdist or a wheel, made without a network."""
    into.mkdir(exist_ok=True)
    line = [sys.executable, "-c", BUILD.format(what), str(into)]
    done = subprocess.run(line, cwd=source, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    (made,) = into.iterdir()
    return made


def made_here(folder: str, names: list[str]) -> list[str]:
    """What is in a checkout beside its source."""
    top = {"runs", "build", "dist"} if Path(folder) == ROOT else set()
    ends = (".egg-info", "__pycache__")
    return [n for n in names if n in top or n.startswith(".") or n.endswith(ends)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, so that the sdist holds what the wheel needs."""
    folder = tmp_path_factory.mktemp("build")
    shutil.copytree(ROOT, folder / "source", ignore=made_here)
    sdist = build("sdist", folder / "source", folder / "sdist")
    shutil.unpack_archive(sdist, folder / "unpacked")
    (unpacked,) = (folder / "unpacked").iterdir()
    return build("wheel", unpacked, folder / "wheel")


def with_own_modules(folder: Path) -> Path:
    """A folder of the user's with modules that are called as ours."""
    folder.mkdir()
    for part in PARTS:
        (folder / f"{part}.py").write_text(RAISES)
    (folder / "strategies.py").unlink()
    (folder / "strategies").mkdir()
    (folder / "strategies" / "__init__.py").write_text(RAISES)
    (folder / "three.toml").write_text(SIMULATION)
    return folder


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> User:
    """A virtual environment of the wheel; what it depends on is taken from this Python's."""
    made = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", made / "venv"], check=True)
    user = User(made / "venv" / "bin", with_own_modules(made / "study"))
    (site,) = (made / "venv" / "lib").glob("python*/site-packages")
    others = Path(torch.__file__).parents[1]  # not their .pth files
    (site / "others.pth").write_text(f"{others}\n")
    for script in distribution("flwr").entry_points.select(group="console_scripts"):
        file = user.bin / script.name
        code = f"import sys\nfrom {script.module} import {script.attr}\nsys.exit({script.attr}())\n"
        file.write_text(f"#!{user.bin / 'python'}\n{code}")
        file.chmod(0o755)
    alone = ("--no-deps", "--no-index", "--ignore-installed", "--quiet")
    user.run("python", "-m", "pip", "install", *alone, str(wheel))
    return user


def test_the_wheel_holds_one_package_with_its_types_and_says_what_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
    assert {name.split("/")[0] for name in names} == {"coterie", metadata.split("/")[0]}
    assert {f"coterie/{part}/py.typed" for part in PARTS} <= names
    assert {"coterie/__init__.py", "coterie/py.typed"} <= names
    sources = {str(p.relative_to(ROOT)) for part in PARTS for p in (ROOT / part).rglob("*.py")}
    assert {f"coterie/{source}" for source in sources} <= names, "every folder is a package"
    for field in ("License-Expression: ", "Requires-Python: ", "Project-URL: Documentation"):
        assert f"\n{field}" in text
    assert "Classifier: Typing :: Typed" in text and "# coterie" in text


@pytest.mark.nightly
def test_what_is_imported_is_the_wheel(installed: User) -> None:
    code = "import coterie.strategies as s; print(s.__file__, s.HCCT.__name__)"
    said = installed.run("python", "-c", code)
    assert said.startswith(str(installed.bin.parent)) and said.endswith("HCCT\n")


@pytest.mark.nightly
def test_every_command_gives_help_beside_modules_of_the_same_names(
    installed: User, tmp_path: Path
) -> None:
    shown = installed.run("python", "-c", HELP)
    assert "coterie simulate" in shown and "coterie silo predict" in shown
    own = tmp_path / "study"
    editable = User(Path(sys.executable).parent, with_own_modules(own))
    assert editable.run("python", "-c", HELP) == shown
    assert "round 2/2" in editable.run("coterie", "simulate", "three.toml")


@pytest.mark.nightly
def test_the_demo_finds_the_hidden_groups(installed: User) -> None:
    """Ten silos as separate processes; one joins, one leaves."""
    said = installed.run("coterie", "demo", "--seed", "3", "--rounds", "6", "--workdir", "demo")
    assert "found exactly" in said
    assert "(+upright-late)" in said and "(-shifted-2)" in said
    means = re.search(r"mean of 8 .*", said)
    assert means, said
    alone, everybody, grouped = (float(x) for x in re.findall(r"\d+\.\d", means[0]))
    assert grouped < alone and grouped < everybody
    used = re.search(r"peak memory ([\d.]+) GB", said)
    assert used and float(used[1]) < 5
    records = [record_of(file.parent) for file in installed.folder.glob("demo/runs/*/run.json")]
    (found,) = (record for record in records if record["config"]["strategy"] == "hcct")
    assert sum(map(len, found["final-groups"])) == 9, "one joined, one left"


@pytest.fixture
def address(installed: User) -> Iterator[str]:
    """Of the Control API of a SuperLink with two silos, all of them the user's processes."""
    ports = Ports.free()
    fleet, controls = f"127.0.0.1:{ports.fleet}", f"127.0.0.1:{ports.control}"
    own = ("--fleet-port", str(ports.fleet), "--control-port", str(ports.control))
    runtime = ("--runtime-port", str(ports.runtime))
    processes = [installed.start("superlink", "superlink", *own, *runtime)]
    try:
        for name, options in OPTIONS.items():
            given = [part for item in options.items() for part in ("--set", "{}={}".format(*item))]
            line = ("silo", "serve", "--name", name, "--superlink", fleet, *given)
            processes.append(installed.start(name, *line))
        with control(controls) as calls:
            until(lambda: calls.num_online() == 2, "two silos", deadline_s=120)
        yield controls
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait(30)


@pytest.mark.nightly
def test_flower_run_and_simulate_work_beside_modules_of_the_same_names(
    installed: User, address: str, tmp_path: Path
) -> None:
    """Through Flower's own command, from this checkout's manifest, on the wheel's code."""
    simulated = installed.run("coterie", "simulate", "three.toml", "--runs-dir", "simulated")
    assert "round 2/2" in simulated
    home = tmp_path / "flwr"
    home.mkdir()
    text = "[superlink]\ndefault = 'here'\n[superlink.here]\n"
    (home / "config.toml").write_text(f"{text}address = '{address}'\ninsecure = true\n")
    values = {**KEYS, "runs-dir": str(tmp_path / "runs")}
    keys = " ".join(f"{key}={value!r}".replace('"', "'") for key, value in values.items())
    user = replace(installed, flower_home=home)
    user.run("flwr", "run", str(ROOT), "here", "--run-config", keys, "--stream")
    (folder,) = (tmp_path / "runs").iterdir()
    configs = [SiloSpec(name, options=OPTIONS[name]).node_config() for name in OPTIONS]
    expected = tmp_path / "in-process"
    execute(InProcessGrid(app, configs), RunConfig.read(KEYS), run_id=1, folder=expected)
    assert finished(folder) == record_of(expected)["model-hashes"]
