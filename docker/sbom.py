"""Say what is in an image, as CycloneDX 1.6: every Python and every Debian package.

    python3 sbom.py coterie-silo report.json …  > sbom.cdx.json

Run while the image is built. The reports are pip's, of what it has installed; they alone know the
hashes of the wheels.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path
from shutil import which
from typing import Any

SITE = "/opt/coterie/lib"
MAX_LICENCE = 80
"""Letters: some packages have the whole text of theirs where its name should be."""


def hashes(reports: list[Path]) -> dict[str, str]:
    """Package → SHA-256 of the wheel that was installed."""
    found = {}
    for report in reports:
        for item in json.loads(report.read_text(encoding="utf-8"))["install"]:
            archive = item["download_info"].get("archive_info", {})
            sha256 = archive.get("hashes", {}).get("sha256", "")
            if sha256:
                found[normal(item["metadata"]["name"])] = sha256
    return found


def normal(name: str) -> str:
    """A package's name as package indexes spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def licence(package: Distribution) -> list[dict[str, Any]]:
    """What a package says of its licence: an expression, a name, or what it is filed under."""
    metadata = package.metadata
    if expression := metadata.get("License-Expression"):
        return [{"expression": expression}]
    name = metadata.get("License", "")
    if name and name != "UNKNOWN" and len(name) <= MAX_LICENCE and "\n" not in name:
        return [{"license": {"name": name}}]
    filed = [one for one in metadata.get_all("Classifier", []) if one.startswith("License ::")]
    return [{"license": {"name": one.rpartition(" :: ")[2]}} for one in sorted(set(filed))]


def python_component(package: Distribution, known: dict[str, str]) -> dict[str, Any]:
    """One Python package."""
    name = normal(package.metadata["Name"])
    purl = f"pkg:pypi/{name}@{package.version}"
    made: dict[str, Any] = {
        "type": "library", "bom-ref": purl, "name": name, "version": package.version, "purl": purl,
    }  # fmt: skip
    if licences := licence(package):
        made["licenses"] = licences
    if name in known:
        made["hashes"] = [{"alg": "SHA-256", "content": known[name]}]
    return made


def debian_components() -> list[dict[str, Any]]:
    """Every Debian package of the image, if it is Debian's."""
    if which("dpkg-query") is None:
        return []
    listed = subprocess.run(
        ["dpkg-query", "--show", "--showformat", "${Package} ${Version} ${Architecture}\n"],
        stdout=subprocess.PIPE, text=True, check=True, timeout=60,
    ).stdout  # fmt: skip
    found = []
    for line in sorted(listed.splitlines()):
        name, version, architecture = line.split()
        purl = f"pkg:deb/debian/{name}@{version.replace('+', '%2B')}?arch={architecture}"
        found.append(
            {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
        )
    return found


def bill(
    image: str, packages: list[Distribution], known: dict[str, str], system: list[dict[str, Any]]
) -> dict[str, Any]:
    """The whole document: the same for the same packages."""
    own = {normal(package.metadata["Name"]): package.version for package in packages}
    python = {"type": "platform", "bom-ref": "python", "name": "python"}
    components = {
        one["bom-ref"]: one
        for one in (
            {**python, "version": platform.python_version()},
            *(python_component(package, known) for package in packages),
            *system,
        )
    }
    top = {"type": "container", "bom-ref": image, "name": image, "version": own["coterie"]}
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": top},
        "components": [components[ref] for ref in sorted(components)],
    }


def main() -> None:
    """Print the bill of the image that is being built."""
    image, *reports = sys.argv[1:]
    places = [*map(str, Path(SITE).glob("python3*/site-packages")), *sys.path]
    found = list(distributions(path=places))
    made = bill(image, found, hashes([Path(one) for one in reports]), debian_components())
    print(json.dumps(made, indent=1))


if __name__ == "__main__":
    main()
