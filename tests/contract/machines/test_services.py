"""The units of systemd, as systemd's own tools read them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.commands import coterie

UNITS = Path(__file__).parents[3] / "docker" / "systemd"
MOST_EXPOSED = 3.0
"""Of 10, as `systemd-analyze security` counts; a unit with nothing around it has 9.6."""
OF_A_SERVICE = {"Type", "ExecStart", "Restart", "RestartSec", "KillMode", "TimeoutStopSec"}
OF_A_LOOK = {"Type", "ExecStart", "SuccessExitStatus", "TimeoutStartSec"}


def service_of(name: str) -> dict[str, str]:
    """Key → value of a unit's section for its process."""
    text = (UNITS / name).read_text().partition("[Service]")[2].partition("[Install]")[0]
    return dict(re.findall(r"^([A-Z]\w+)=(.*)$", text, flags=re.MULTILINE))


@pytest.mark.parametrize(
    ("name", "what"), [("coterie", "health"), ("coterie-silo", "health"), ("coterie-silo", "watch")]
)
def test_a_unit_keeps_its_process_in_its_folder_and_so_does_a_timers(name: str, what: str) -> None:
    own, look = service_of(f"{name}@.service"), service_of(f"{name}-{what}@.service")
    assert own["ReadWritePaths"] == own["WorkingDirectory"] == "%f"
    assert own["User"] == "coterie" and own["Restart"] == "on-failure"
    assert float(own["TimeoutStopSec"]) > 2 * 10, "two programs are given 10 s each"
    assert ("PrivateDevices" in own) == (name == "coterie"), "a silo may have GPUs"
    assert look["SuccessExitStatus"] == "1", "a warning is no failure"
    around = [
        {k: v for k, v in one.items() if k not in OF_A_SERVICE | OF_A_LOOK} for one in (own, look)
    ]
    assert around[0] == around[1]


@pytest.mark.parametrize("file", sorted(UNITS.glob("*.service")), ids=lambda file: file.name)
def test_a_unit_starts_a_command_that_there_is(file: Path) -> None:
    words = service_of(file.name)["ExecStart"].split()
    assert words[0] == "/opt/coterie/bin/coterie" and words[-1] == "%f"
    *command, option = words[1:-1]
    help_of = coterie(*command, "--help")
    assert help_of.returncode == 0 and option in help_of.stdout


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_systemd_reads_every_unit_and_finds_little_exposed() -> None:
    for file in sorted(UNITS.iterdir()):
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", str(file)],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        odd = [line for line in done.stderr.splitlines() if "is not executable" not in line]
        assert not odd, odd
    for name in ("coterie", "coterie-silo"):
        done = subprocess.run(
            ["systemd-analyze", "security", "--offline=yes", "--no-pager",
             str(UNITS / f"{name}@.service")],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        found = re.search(r"exposure level for \S+: ([0-9.]+)", done.stdout)
        assert found is not None, done.stderr
        assert float(found[1]) <= MOST_EXPOSED
