"""Write down which release of every package goes into the images: `make pins`.

Three lists beside this file: what both images have, what a silo has besides, and what PyTorch
brings along for NVIDIA's GPUs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
ONLY_SILOS = ("torch", "torchvision")
CUDA = ("cuda-", "nvidia-", "triton")


def resolved(requirements: list[str]) -> dict[str, str]:
    """Name → release of everything that pip would install for these."""
    line = [sys.executable, "-m", "pip", "install", "-qq", "--dry-run", "--ignore-installed"]
    done = subprocess.run(
        [*line, "--report", "-", *requirements], stdout=subprocess.PIPE, check=True, timeout=900
    )
    found = [item["metadata"] for item in json.loads(done.stdout)["install"]]
    return {one["name"]: one["version"] for one in found}


def write(name: str, title: str, pins: dict[str, str]) -> None:
    """A list of pins, in alphabetical order."""
    lines = [f"{package}=={pins[package]}\n" for package in sorted(pins, key=str.lower)]
    (HERE / name).write_text(f"# {title} Written by `make pins`.\n{''.join(lines)}")


def main() -> None:
    """Resolve what pyproject.toml asks for, and write the lists."""
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    coordinators = [
        one for one in project["dependencies"] if not one.startswith(ONLY_SILOS)
    ] + extras["tensorboard"]
    silos = [*project["dependencies"], *extras["tensorboard"], *extras["privacy"]]
    every = resolved(silos)
    both = {name: every[name] for name in resolved(coordinators)}
    cuda = {name: version for name, version in every.items() if name.startswith(CUDA)}
    silo = {name: every[name] for name in every.keys() - both.keys() - cuda.keys()}
    write("requirements.txt", "In both images.", both)
    write(
        "requirements-silo.txt", "In a silo's image besides: PyTorch, differential privacy.", silo
    )
    write("requirements-cuda.txt", "PyTorch's libraries for NVIDIA's GPUs.", cuda)


if __name__ == "__main__":
    main()
