"""Write what goes into the images, release and hashes of every package: `make pins`.

Four lists beside this file: what both images have, what a silo has besides, what PyTorch brings
along for NVIDIA's GPUs, and what builds coterie's wheel. The hashes are those of the wheels for
``PYTHONS`` on ``MACHINES``. The digest of the base image is written into the Dockerfile and
compose.yaml if its registry answers.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ONLY_SILOS = ("torch", "torchvision")
CUDA = ("cuda-", "nvidia-", "triton")
PYTHONS = ("3.11", "3.12", "3.13")
"""Of Debian 12, of the default base image, and of Debian 13."""
MACHINES = ("x86_64", "aarch64")
NEWEST_GLIBC, OLDEST_GLIBC = 36, 5
"""2.36 is Debian 12's; a wheel that needs a newer one is not listed."""
DEADLINE_S = 900


def report_of(*arguments: str) -> list[Any]:
    """Return pip's report of what it would install with these arguments."""
    line = [sys.executable, "-m", "pip", "install", "-qq", "--dry-run", "--ignore-installed"]
    done = subprocess.run(
        [*line, "--report", "-", *arguments],
        stdout=subprocess.PIPE, check=True, timeout=DEADLINE_S,
    )  # fmt: skip
    found: list[Any] = json.loads(done.stdout)["install"]
    return found


def resolved(requirements: list[str]) -> dict[str, str]:
    """Return name → release of everything that pip would install for these."""
    found = [item["metadata"] for item in report_of(*requirements)]
    return {one["name"]: one["version"] for one in found}


def hashes_of(pins: Mapping[str, str]) -> dict[str, set[str]]:
    """Return name → SHA-256 of its wheels for every Python and machine."""
    found: dict[str, set[str]] = {name: set() for name in pins}
    for python in PYTHONS:
        for machine in MACHINES:
            glibcs = range(NEWEST_GLIBC, OLDEST_GLIBC - 1, -1)
            tags = [f"manylinux_2_{minor}_{machine}" for minor in glibcs]
            tags += [f"manylinux{year}_{machine}" for year in (2014, 2010, 1)]
            report = report_of(
                *("--no-deps", "--only-binary", ":all:", "--target", "unused"),
                *("--python-version", python, *(f"--platform={tag}" for tag in tags)),
                *(f"{name}=={release}" for name, release in pins.items()),
            )
            for item in report:
                archive = item["download_info"]["archive_info"]
                found[item["metadata"]["name"]].add(archive["hashes"]["sha256"])
    return found


def write(name: str, title: str, pins: Mapping[str, str]) -> None:
    """Write a list of pins with their hashes, one package per line, in alphabetical order."""
    hashes = hashes_of(pins)
    lines = [
        " ".join([f"{one}=={pins[one]}", *(f"--hash=sha256:{h}" for h in sorted(hashes[one]))])
        for one in sorted(pins, key=str.lower)
    ]
    text = "".join(f"{line}\n" for line in lines)
    (HERE / name).write_text(f"# {title} Written by `make pins`.\n{text}")


def pin_base(dockerfile: Path, *others: Path) -> str:
    """Write the digest of the Dockerfile's base image behind its tag; return what was done."""
    text = dockerfile.read_text(encoding="utf-8")
    found = re.search(r"^ARG BASE=([^@\s]+)(@\S+)?$", text, re.MULTILINE)
    assert found is not None, "the Dockerfile names its base"
    line = ["docker", "buildx", "imagetools", "inspect", found[1]]
    try:
        done = subprocess.run(
            [*line, "--format", "{{.Manifest.Digest}}"],
            capture_output=True, text=True, check=True, timeout=DEADLINE_S,
        )  # fmt: skip
        digest = done.stdout.strip()
        if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
            raise ValueError(f"{' '.join(line)} printed {digest!r} instead of a digest")
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        why = getattr(error, "stderr", "") or error
        return f"The digest of the base image {found[1]} could not be read: {why}"
    pinned = re.compile(rf"{re.escape(found[1])}(@sha256:\w+)?")
    for file in (dockerfile, *others):
        file.write_text(pinned.sub(f"{found[1]}@{digest}", file.read_text(encoding="utf-8")))
    return f"The base image is {found[1]}@{digest}"


def main() -> None:
    """Resolve what pyproject.toml asks for, and write the lists."""
    content = tomllib.loads((HERE.parent / "pyproject.toml").read_text(encoding="utf-8"))
    project = content["project"]
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
    write(
        "requirements-build.txt",
        "What builds coterie's wheel; in no image.",
        resolved(content["build-system"]["requires"]),
    )
    print(pin_base(HERE / "Dockerfile", HERE.parent / "compose.yaml"))


if __name__ == "__main__":
    main()
