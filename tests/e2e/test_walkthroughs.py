"""The tutorial of the documentation, run as it is written.

One thing is changed: the coordinator listens on free ports, so that a test disturbs nobody.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from coterie.server.machine.superlink import Ports
from tests.e2e.runs import until

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(
    r"^```(\w+)( title=\"in its own terminal[^\n]*)?\n(.*?)^```", flags=re.DOTALL | re.MULTILINE
)


@dataclass
class Step:
    """A command, whether it stays, and the lines that it should print; ``…`` is anything."""

    command: str
    stays: bool
    screen: list[str] = field(default_factory=list)

    def missing(self, output: str) -> list[str]:
        """Lines that it should have printed and has not."""
        forms = {line: ".*".join(map(re.escape, line.split("…"))) for line in self.screen}
        return [line for line, form in forms.items() if not re.search(form, output)]


def steps(page: str) -> tuple[dict[str, str], list[Step]]:
    """Files to save, by name, and the commands in order."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    files, commands = dict[str, str](), list[Step]()
    for kind, service, body in BLOCK.findall(text):
        before = text[: text.index(body)]
        if kind == "toml":
            files[re.findall(r"`([\w-]+\.toml)`", before)[-1]] = body
        elif kind == "python":
            files[re.findall(r"# (\w+\.py)", body)[0]] = body
        elif kind == "text":
            commands[-1].screen += [line.strip() for line in body.splitlines()]
        else:
            commands.append(Step(body, bool(service)))
    assert files and commands
    return files, commands


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_the_tutorial_works_as_it_is_written(tmp_path: Path) -> None:
    files, commands = steps("guide/approved-run.md")
    for name, body in files.items():
        (tmp_path / name).write_text(body, encoding="utf-8")
    ports = Ports.free()
    address = f"--address localhost:{ports.fleet} --control-port {ports.control} "
    address += f"--runtime-port {ports.runtime}"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PATH": str(Path(sys.executable).parent) + os.pathsep + os.environ["PATH"],
    }
    services = []
    try:
        for step in commands:
            command = step.command.replace("--address localhost", address)
            if step.stays:
                log = tmp_path / f"service-{len(services)}.log"
                with log.open("wb") as out:
                    services.append(
                        subprocess.Popen(
                            ["bash", "-ec", f"exec {command}"],
                            cwd=tmp_path, env=environment, stdout=out, stderr=out,
                            start_new_session=True,
                        )
                    )  # fmt: skip
                if "superlink" in command:
                    until(
                        lambda log=log: "operators to" in log.read_text(),
                        "the SuperLink",
                        deadline_s=120,
                    )
                continue
            done = subprocess.run(
                ["bash", "-euc", command], cwd=tmp_path, env=environment,
                capture_output=True, text=True, timeout=400, check=False,
            )  # fmt: skip
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
            assert not step.missing(done.stdout + done.stderr), done.stdout + done.stderr
        for silo in ("north", "south", "east"):
            assert list((tmp_path / silo / "models").glob("*.safetensors"))
    finally:
        for service in reversed(services):
            service.terminate()
        for service in services:
            service.wait(30)
