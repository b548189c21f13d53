"""The charts' pods on a Docker engine: containers, mounts, users and probes as the manifests say.

No cluster: what a kubelet does with a pod is done by compose, from the manifests that Helm renders.
A coordinator and two silos, enrolled as the guide says, train together.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from coterie.client.home import folder as home
from coterie.server.site import enrolled, federation
from coterie.wire import enrolment
from tests.containers.compose import BUILD_DEADLINE_S, ROOT, compose_command, docker
from tests.contract.machines.charts import COORDINATOR, render

SILOS = ("hospital-a", "hospital-b")
READY_S, RUN_S = 180.0, 300.0
MAX_LINES = 40
pytestmark = pytest.mark.timeout(4500)


def files_of(
    manifests: list[dict[str, Any]], secrets: dict[str, dict[str, str]], folder: Path
) -> None:
    """What ConfigMaps and Secrets hold, as files: ``folder/<kind>/<name>/<key>``."""
    settings = {m["metadata"]["name"]: m["data"] for m in manifests if m["kind"] == "ConfigMap"}
    for kind, held in (("secret", secrets), ("configMap", settings)):
        for name, data in held.items():
            (folder / kind / name).mkdir(parents=True)
            for key, content in data.items():
                (folder / kind / name / key).write_text(content)


def services_of(manifests: list[dict[str, Any]], folder: Path) -> tuple[dict[str, Any], set[str]]:
    """Compose's services and volumes for a release's pod.

    What comes first is a service that the others wait for; a Service's name is the pod's too.
    """
    (made,) = [one for one in manifests if one["kind"] == "StatefulSet"]
    release, pod = made["metadata"]["name"], made["spec"]["template"]["spec"]
    claims = {one["metadata"]["name"] for one in made["spec"]["volumeClaimTemplates"]}
    sources = {one["name"]: one for one in pod["volumes"]}
    (first,), (main,) = pod["initContainers"], pod["containers"]

    def service(container: dict[str, Any]) -> dict[str, Any]:
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        volumes, scratch = [], []
        for mount in container["volumeMounts"]:
            source, mode = sources.get(mount["name"], {}), ":ro" if mount.get("readOnly") else ""
            if mount["name"] in claims:
                volumes.append(f"{release}-{mount['name']}:{mount['mountPath']}{mode}")
            elif "emptyDir" in source:
                scratch.append(mount["mountPath"])
            else:
                (kind,) = {"secret", "configMap"} & source.keys()
                name = source[kind]["secretName" if kind == "secret" else "name"]
                volumes.append(f"{folder / kind / name}:{mount['mountPath']}{mode}")
        made: dict[str, Any] = {
            "image": container["image"],
            "user": f"{pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}",
            "read_only": security["readOnlyRootFilesystem"],
            "cap_drop": security["capabilities"]["drop"],
            "security_opt": ["no-new-privileges:true"],
            "environment": {one["name"]: one["value"] for one in container.get("env", [])},
            "command": container["args"],
            "volumes": volumes,
            "tmpfs": scratch,
            "mem_limit": container["resources"]["limits"]["memory"].removesuffix("i").lower(),
        }  # fmt: skip
        if "command" in container:
            made["entrypoint"] = container["command"]
        return made

    probe = main["readinessProbe"]["exec"]["command"]
    running = service(main) | {
        "depends_on": {f"{release}-first": {"condition": "service_completed_successfully"}},
        "healthcheck": {"test": ["CMD", *[word.replace("$", "$$") for word in probe]],
                        "interval": "5s", "timeout": "30s", "retries": 30},
    }  # fmt: skip
    services = {
        f"{release}-first": service(first) | {"healthcheck": {"disable": True}},
        release: running,
    }
    return services, {f"{release}-{claim}" for claim in claims}


class Pods:
    """The charts' containers, as one compose project."""

    def __init__(self, folder: Path) -> None:
        self.project = f"coterie-chart-{os.getpid()}"
        self.command = [
            *compose_command(),
            "--project-name",
            self.project,
            "--file",
            f"{folder}/compose.yaml",
        ]
        self.folder = folder

    def compose(self, *arguments: str) -> str:
        done = subprocess.run(
            [*self.command, *arguments], check=False, text=True, timeout=RUN_S,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-4000:]
        return done.stdout

    def inside(self, service: str, *command: str) -> str:
        return self.compose("exec", "-T", service, *command)

    def wait_until_ready(self, service: str) -> None:
        """Until its readiness probe succeeds."""
        deadline = time.monotonic() + READY_S
        name = self.compose("ps", "-q", service).strip()
        while (
            state := docker("inspect", "--format", "{{.State.Health.Status}}", name).strip()
        ) != "healthy":
            if time.monotonic() > deadline:
                log = self.compose("logs", f"--tail={MAX_LINES}", service)
                pytest.fail(
                    f"waited {READY_S:.0f} s for {service} to be ready, it is {state}:\n{log}"
                )
            time.sleep(1.0)


def secrets_of(folder: Path) -> dict[str, dict[str, str]]:
    """CA and keys as people make them: `federation init`, `silo init`, `enrol`, `silo join`."""
    made = federation.create(folder / "study", ["study:9092"])
    found = {"study-ca": {name: (made.tls / name).read_text() for name in ("ca.pem", "ca.key")}}
    for name in SILOS:
        own = home.create(folder / name, name)
        entry = enrolled.enrol(made.roster, enrolment.read_request(own.request()))
        bundle = enrolment.Bundle(
            name, entry.fingerprint, made.config.addresses[0], made.ca.read_bytes()
        )
        own.join(enrolment.write_bundle(bundle))
        found[name] = {
            file: (folder / name / file).read_text() for file in ("key.pem", "coordinator.json")
        }
    return found


def silo_values(number: int, name: str) -> dict[str, Any]:
    split = f'[data]\nsplit = "iid"\nsilos = {len(SILOS)}\nsilo = {number}\n'
    return {"siloToml": f'name = "{name}"\ntask = "digits"\n{split}', "existingSecret": name}


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pods]:
    subprocess.run(["make", "images"], cwd=ROOT, check=True, timeout=BUILD_DEADLINE_S)
    folder = tmp_path_factory.mktemp("pods")
    secrets = secrets_of(folder)
    releases = [render("coordinator", "study", COORDINATOR)]
    releases += [render("silo", name, silo_values(i, name)) for i, name in enumerate(SILOS)]
    services: dict[str, Any] = {}
    volumes: set[str] = set()
    for manifests in releases:
        release = next(m["metadata"]["name"] for m in manifests)
        place = folder / "mounted" / release
        files_of(manifests, secrets, place)
        own, kept = services_of(manifests, place)
        services |= own
        volumes |= kept
    subprocess.run(["chmod", "-R", "a+rX", str(folder / "mounted")], check=True)  # as fsGroup does
    text = {"version": "2.4", "services": services, "volumes": {one: {} for one in sorted(volumes)}}
    (folder / "compose.yaml").write_text(yaml.safe_dump(text))
    made = Pods(folder)
    try:
        made.compose("up", "-d", "study")
        made.wait_until_ready("study")
        yield made
    finally:
        made.compose("down", "--volumes", "--remove-orphans")


def test_enrolled_silos_of_the_charts_train_together(pods: Pods) -> None:
    """The whole way: probes succeed, a run completes, each silo keeps its model on its volume."""
    for name in SILOS:
        request = home.Home(pods.folder / name).request()
        pods.inside("study", "coterie", "members", "enrol", request)
    pods.compose("up", "-d", *SILOS)
    for name in SILOS:
        pods.wait_until_ready(name)
    printed = pods.inside(
        "study", "coterie", "run", "fedavg", "--rounds=2", "--min-silos=2", "--task=digits"
    )
    assert "models and record: /federation/runs/" in printed
    for name in SILOS:
        kept = pods.inside(name, "sh", "-c", "find /silo -name '*.safetensors'")
        assert kept.strip(), f"{name} kept no model"


def test_keys_are_only_where_they_belong_and_are_nobody_elses_to_read(pods: Pods) -> None:
    modes = {"study": "/federation/tls/ca.key", "hospital-a": "/silo/key.pem"}
    for service, file in modes.items():
        assert pods.inside(service, "stat", "--format=%a %u", file).split() == ["600", "10001"]
        assert "/secret" not in pods.inside(service, "cat", "/proc/mounts")


def test_the_root_file_system_is_read_only(pods: Pods) -> None:
    for service in ("study", "hospital-a"):
        printed = pods.inside(service, "sh", "-c", "touch /opt/x /home/coterie/x 2>&1; true")
        assert printed.count("Read-only file system") == 2


def test_a_restarted_pod_goes_on_with_what_is_on_its_volume(pods: Pods) -> None:
    """The first container lays the folder again; roster, certificate and database stay."""
    before = json.loads(pods.inside("study", "cat", "/federation/roster.json"))
    pods.compose("rm", "-f", "-s", "study", "study-first")
    pods.compose("up", "-d", "study")
    pods.wait_until_ready("study")
    assert json.loads(pods.inside("study", "cat", "/federation/roster.json")) == before
    deadline = time.monotonic() + READY_S
    while pods.inside("study", "coterie", "members", "list").count("online") < len(SILOS):
        assert time.monotonic() < deadline, "the silos did not come back"
        time.sleep(2.0)
