"""What is stated of vulnerabilities of pinned packages is of these releases, and true."""

from __future__ import annotations

import json
import re
import tomllib
from importlib.metadata import distribution
from pathlib import Path

from tests.rules.test_imports import OURS, ROOT, sources

STATEMENT = ROOT / "docker" / "cryptography.openvex.json"


def test_the_statement_is_of_the_pinned_release_and_on_the_page() -> None:
    pins = (ROOT / "docker" / "requirements.txt").read_text(encoding="utf-8").splitlines()
    (pin,) = (line.split()[0] for line in pins if line.startswith("cryptography=="))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    page = (ROOT / "docs" / "how-to" / "scanners.md").read_text(encoding="utf-8")
    for one in json.loads(STATEMENT.read_text(encoding="utf-8"))["statements"]:
        parts = [part["@id"] for item in one["products"] for part in item["subcomponents"]]
        assert set(parts) == {f"pkg:pypi/{pin.replace('==', '@')}"}
        assert one["products"][0]["@id"] == f"pkg:pypi/coterie@{project['version']}"
        assert f"| {one['vulnerability']['name']} |" in page
        assert ("justification" in one) == (one["status"] == "not_affected")


def test_neither_we_nor_flower_name_what_is_said_not_to_be_called() -> None:
    flower = Path(str(distribution("flwr").locate_file("flwr"))).rglob("*.py")
    own = [file for part in sorted(OURS) for file in sources(part)]
    called = re.compile(r"x509\.verification|x509 import .*verification|pkcs7", re.IGNORECASE)
    assert not [file for file in (*flower, *own) if called.search(file.read_text("utf-8"))]
