"""The images that `make images` makes: who they run as, what is in them and what is not."""

from __future__ import annotations

import json
import subprocess
import tomllib

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from tests.containers.compose import BUILD_DEADLINE_S, ROOT, docker

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
IMAGES = ("coterie-coordinator", "coterie-silo")
pytestmark = pytest.mark.timeout(4500)


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """Both, made as a person makes them."""
    subprocess.run(["make", "images"], cwd=ROOT, check=True, timeout=BUILD_DEADLINE_S)


def inside(image: str, *command: str) -> str:
    """What a command prints in a container whose root file system is read-only."""
    limits = ("--rm", "--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", "--network=none")
    return docker("run", *limits, f"--entrypoint={command[0]}", f"{image}:{VERSION}", *command[1:])


@pytest.mark.parametrize("image", IMAGES)
def test_it_says_its_version_and_of_which_source_it_is(image: str) -> None:
    config = json.loads(docker("inspect", f"{image}:{VERSION}"))[0]["Config"]
    labels = {key.rpartition(".")[2]: value for key, value in config["Labels"].items()}
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert labels["version"] == VERSION
    assert labels["revision"].removesuffix("-dirty") == head.stdout.strip()
    assert config["User"] == "10001:10001" and config["Healthcheck"]["Test"]


@pytest.mark.parametrize("image", IMAGES)
def test_there_is_nothing_in_it_to_build_or_install_with(image: str) -> None:
    tools = "gcc cc g++ make pip pip3 git curl wget"
    found = inside(image, "sh", "-c", f"for t in {tools}; do command -v $t; done; true")
    assert found == ""
    assert inside(image, "sh", "-c", "ls /root/.cache /var/cache/apt/archives/*.deb 2>&1; true")


@pytest.mark.parametrize("image", IMAGES)
def test_its_bill_is_valid_and_names_what_python_finds(image: str) -> None:
    text = (ROOT / "build" / f"{image}.cdx.json").read_text(encoding="utf-8")
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    listed = {
        (one["name"], one["version"])
        for one in json.loads(text)["components"]
        if one.get("purl", "").startswith("pkg:pypi/")
    }
    code = (
        "import json, re; from importlib.metadata import distributions as d;"
        "print(json.dumps([[re.sub('[-_.]+', '-', x.metadata['Name']).lower(), x.version]"
        " for x in d()]))"
    )
    found = {tuple(one) for one in json.loads(inside(image, "python", "-c", code))}
    assert found <= listed
    hashed = [one for one in json.loads(text)["components"] if "hashes" in one]
    assert len(hashed) == len(found) - 1, "of all but coterie itself"


def test_a_coordinator_has_no_pytorch_and_says_so_where_it_needs_it() -> None:
    code = (
        "from importlib.util import find_spec; assert find_spec('torch') is None\n"
        "from coterie.server.runs.config import RunConfig\n"
        "RunConfig.read({'strategy': 'hcct'})\n"
        "try:\n    RunConfig.read({'strategy': 'fedgenp'})\n"
        "except Exception as error:\n    print(error)"
    )
    assert "which needs PyTorch: install" in inside("coterie-coordinator", "python", "-c", code)


def test_a_silo_has_differential_privacy() -> None:
    code = (
        "import torch, torchvision, importlib.util\n"
        "from opacus.accountants.analysis import rdp\n"
        "print(rdp.compute_rdp(q=0.1, noise_multiplier=1.0, steps=10, orders=8.0) > 0)"
    )
    assert inside("coterie-silo", "python", "-c", code).strip().endswith("True")


@pytest.mark.parametrize("image", IMAGES)
def test_packages_that_belong_together_are_there(image: str) -> None:
    """As `pip check`, which is not in the image: what every package asks for is there."""
    code = (
        "from importlib.metadata import distributions as d, version\n"
        "from packaging.requirements import Requirement as R\n"
        "for x in d():\n"
        "    for text in x.requires or []:\n"
        "        r = R(text)\n"
        "        if r.marker and not r.marker.evaluate({'extra': ''}): continue\n"
        "        try:\n"
        "            if not r.specifier.contains(version(r.name), prereleases=True):\n"
        "                print(x.metadata['Name'], text, version(r.name))\n"
        "        except Exception:\n"
        "            print(x.metadata['Name'], text, 'missing')\n"
    )
    found = set(inside(image, "python", "-c", code).splitlines())
    apart = {"coterie torch>=2.6 missing", "coterie torchvision>=0.21 missing"}
    assert found == (apart if image == "coterie-coordinator" else set())
