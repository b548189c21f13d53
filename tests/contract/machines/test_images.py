"""What goes into the images: pinned packages, and the bill of them."""

from __future__ import annotations

import importlib.util
import json
import re
import tomllib
from importlib.metadata import Distribution, distribution
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
LISTS = ("requirements.txt", "requirements-silo.txt", "requirements-cuda.txt")


def script(name: str) -> ModuleType:
    """A script of docker/, which is not a package: it runs where coterie is not installed yet."""
    spec = importlib.util.spec_from_file_location(f"docker_{name}", ROOT / f"docker/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pins, sbom = script("pins"), script("sbom")


def pinned(file: str) -> dict[str, str]:
    lines = (ROOT / "docker" / file).read_text(encoding="utf-8").splitlines()
    return dict(line.split()[0].split("==") for line in lines if not line.startswith("#"))


def objection(bill: dict[str, Any]) -> object:
    """What CycloneDX's own schema has against a bill."""
    return JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(bill))


def test_what_is_pinned_is_what_the_package_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    both, silo, cuda = map(pinned, LISTS)
    every = {sbom.normal(name): version for name, version in (both | silo | cuda).items()}
    extras = project["optional-dependencies"]
    for text in (*project["dependencies"], *extras["privacy"], *extras["tensorboard"]):
        asked = Requirement(text)
        assert asked.specifier.contains(every[sbom.normal(asked.name)]), text


def test_a_coordinator_has_no_pytorch_and_no_package_is_in_two_lists() -> None:
    both, silo, cuda = map(pinned, LISTS)
    assert {"torch", "torchvision", "opacus"} <= silo.keys()
    assert not any(name.startswith(pins.CUDA) for name in both | silo)
    assert len(both | silo | cuda) == len(both) + len(silo) + len(cuda)


@pytest.mark.parametrize("file", [*LISTS, "requirements-build.txt"])
def test_every_package_has_hashes_of_its_wheels(file: str) -> None:
    lines = (ROOT / "docker" / file).read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("#") and len(lines) > 1
    for line in lines[1:]:
        pin, *hashes = line.split()
        assert "==" in pin and hashes and hashes == sorted(set(hashes)), line
        assert all(re.fullmatch("--hash=sha256:[0-9a-f]{64}", one) for one in hashes), line


def test_images_are_built_with_hashes_and_pinned_tools_only() -> None:
    text = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    installs = re.findall(r"pip install [^&;\n]*", text)
    free = [one for one in installs if "--require-hashes" not in one and "--no-index" not in one]
    assert len(installs) == 5 and [one for one in free if "$TORCH_INDEX" not in one] == []
    (wheel,) = re.findall(r"pip wheel [^&;\n]*", text)
    assert "--no-build-isolation" in wheel and "--no-index" in wheel
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    built = pinned("requirements-build.txt")
    for tool in map(Requirement, project["build-system"]["requires"]):
        assert tool.specifier.contains(built[tool.name])


def test_hashes_are_those_of_every_python_and_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def report_of(*line: str) -> list[Any]:
        tag = "none" if "pure==1" not in line else line[line.index("--python-version") + 1]
        machine = next(one for one in line if one.startswith("--platform")).partition("_2_")[2]
        found = {"pure": "aa", "built": f"{tag}-{machine[3:]}"}
        return [
            {
                "metadata": {"name": name},
                "download_info": {"archive_info": {"hashes": {"sha256": sha256}}},
            }
            for name, sha256 in found.items()
        ]

    monkeypatch.setattr(pins, "report_of", report_of)
    found = pins.hashes_of({"pure": "1", "built": "2"})
    assert found["pure"] == {"aa"}
    assert found["built"] == {f"{p}-{m}" for p in pins.PYTHONS for m in pins.MACHINES}


@pytest.mark.parametrize(
    ("printed", "base"),
    [
        (f"sha256:{'ab' * 32}", f"python:3.12@sha256:{'ab' * 32}"),
        ("no such manifest", "python:3.12@sha256:old"),
    ],
)
def test_the_base_is_pinned_if_its_registry_answers(
    printed: str, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker = tmp_path / "docker"
    docker.write_text(f"#!/bin/sh\ntest $4 = python:3.12 && echo '{printed}'\n")
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    file, compose = tmp_path / "Dockerfile", tmp_path / "compose.yaml"
    file.write_text("# base\nARG BASE=python:3.12@sha256:old\nFROM ${BASE}\n")
    compose.write_text("BASE: ${OWN:-python:3.12@sha256:old}\n")
    said = pins.pin_base(file, compose)
    assert file.read_text() == f"# base\nARG BASE={base}\nFROM ${{BASE}}\n"
    assert compose.read_text() == f"BASE: ${{OWN:-{base}}}\n"
    assert ("could not be read" in said) == ("old" in base)
    monkeypatch.setenv("PATH", "/nowhere")
    assert "could not be read" in pins.pin_base(file)


def test_the_base_is_pinned_by_one_digest() -> None:
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    (base,) = re.findall(r"^ARG BASE=(python:\S+@sha256:[0-9a-f]{64})$", dockerfile, re.MULTILINE)
    assert f"${{COTERIE_BASE:-{base}}}" in (ROOT / "compose.yaml").read_text(encoding="utf-8")


def some_packages() -> list[Distribution]:
    return [distribution(name) for name in ("coterie", "numpy", "flwr", "rich", "cffi")]


def test_the_bill_is_cyclonedx_with_versions_licences_and_hashes() -> None:
    system = [{
        "type": "library", "bom-ref": "pkg:deb/debian/tar@1", "name": "tar", "version": "1",
        "purl": "pkg:deb/debian/tar@1",
    }]  # fmt: skip
    bill = sbom.bill("coterie-silo", some_packages(), {"numpy": "ab" * 32}, system)
    assert objection(bill) is None
    by_name = {one["name"]: one for one in bill["components"]}
    assert by_name["numpy"]["hashes"] == [{"alg": "SHA-256", "content": "ab" * 32}]
    assert by_name["numpy"]["version"] == distribution("numpy").version
    assert all("licenses" in by_name[name] for name in ("numpy", "flwr", "rich", "cffi"))
    assert {"tar", "python", "coterie"} <= by_name.keys()
    assert bill == sbom.bill("coterie-silo", some_packages()[::-1], {"numpy": "ab" * 32}, system)


def test_a_bill_that_is_none_would_be_found() -> None:
    bill = sbom.bill("coterie-silo", some_packages(), {"numpy": "not a hash"}, [])
    assert objection(bill) is not None


def test_hashes_are_read_from_pips_report(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    item = {
        "metadata": {"name": "Some.Package", "version": "1"},
        "download_info": {"archive_info": {"hashes": {"sha256": "cd" * 32}}},
    }
    local = {"metadata": {"name": "own", "version": "1"}, "download_info": {"dir_info": {}}}
    report.write_text(json.dumps({"install": [item, local]}))
    assert sbom.hashes([report]) == {"some-package": "cd" * 32}


@pytest.mark.parametrize(
    ("metadata", "licences"),
    [
        ("License-Expression: MIT\nLicense: X", [{"expression": "MIT"}]),
        ("License: BSD", [{"license": {"name": "BSD"}}]),
        ("License: UNKNOWN\nClassifier: License :: OSI Approved :: MIT License",
         [{"license": {"name": "MIT License"}}]),
        ("License: " + "the whole text " * 20, []),
    ],
)  # fmt: skip
def test_a_licence_is_told_as_the_package_tells_it(
    tmp_path: Path, metadata: str, licences: list[dict[str, Any]]
) -> None:
    folder = tmp_path / "some-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: some\nVersion: 1\n{metadata}\n")
    assert sbom.licence(Distribution.at(folder)) == licences
