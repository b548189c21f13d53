"""The Helm charts: rendered by Helm, held against Kubernetes' own schemas."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml

from coterie.server.site import federation
from tests.contract.machines.charts import CHARTS, COORDINATOR, KUBERNETES, SILO, render

PLACED: dict[str, Any] = {
    "image": {"tag": "1", "pullSecrets": [{"name": "registry"}]},
    "storage": {"size": "5Gi", "storageClassName": "local-path"},
    "nodeSelector": {"disk": "ssd"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "affinity": {"podAntiAffinity": {}},
}
FORMS = [
    ("coordinator", COORDINATOR),
    ("coordinator", COORDINATOR | PLACED | {
        "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
        "networkPolicy": {"from": [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
                          "egress": [{"ports": [{"port": 5000, "protocol": "TCP"}]}]}}),
    ("silo", SILO),
    ("silo", SILO | PLACED | {
        "files": {"study.toml": 'kind = "table"\n'},
        "data": {"volume": {"persistentVolumeClaim": {"claimName": "study-data"}}},
        "resources": {"limits": {"nvidia.com/gpu": 1}},
        "networkPolicy": {"port": 443, "to": [{"ipBlock": {"cidr": "192.0.2.7/32"}}]}}),
]  # fmt: skip


def of_kind(manifests: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = [one for one in manifests if one["kind"] == kind]
    return found


def pod(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = of_kind(manifests, "StatefulSet")["spec"]["template"]["spec"]
    return found


@pytest.mark.parametrize("kubernetes", KUBERNETES)
@pytest.mark.parametrize(("chart", "values"), FORMS)
def test_what_the_charts_make_is_what_kubernetes_takes(
    chart: str, values: dict[str, Any], kubernetes: str
) -> None:
    manifests = render(chart, "study", values)
    assert {"ConfigMap", "NetworkPolicy", "StatefulSet"} <= {one["kind"] for one in manifests}
    for manifest in manifests:
        kubernetes_validate.validate(manifest, kubernetes, strict=True)


def test_a_wrong_manifest_would_be_found() -> None:
    wrong = of_kind(render("silo", "study", SILO), "StatefulSet")
    wrong["spec"]["template"]["spec"]["containers"][0]["readOnlyRootFilesystem"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, KUBERNETES[-1], strict=True)


@pytest.mark.parametrize(("chart", "values"), FORMS)
def test_helm_finds_nothing_wrong(chart: str, values: dict[str, Any]) -> None:
    found = helm_python.lint(CHARTS / chart, values, strict=True)
    assert found["errors"] == []
    assert {one["error"] for one in found["messages"]} <= {"icon is recommended"}


@pytest.mark.parametrize(("chart", "values"), FORMS)
def test_no_container_is_root_writes_to_its_image_or_has_privileges(
    chart: str, values: dict[str, Any]
) -> None:
    made = pod(render(chart, "study", values))
    assert made["securityContext"]["runAsNonRoot"] is True
    assert made["securityContext"]["runAsUser"] == 10001
    assert made["automountServiceAccountToken"] is False
    for container in [*made["initContainers"], *made["containers"]]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["limits"]


@pytest.mark.parametrize(("chart", "values"), FORMS)
def test_keys_come_from_a_secret_that_only_the_first_container_sees(
    chart: str, values: dict[str, Any]
) -> None:
    made = pod(render(chart, "study", values))
    (secret,) = [one["name"] for one in made["volumes"] if "secret" in one]
    seen = [one for one in made["containers"] for m in one["volumeMounts"] if m["name"] == secret]
    assert seen == []
    assert secret in {m["name"] for m in made["initContainers"][0]["volumeMounts"]}


@pytest.mark.parametrize(
    ("chart", "values", "named"),
    [
        ("coordinator", COORDINATOR | {"addresses": []}, "addresses"),
        ("coordinator", COORDINATOR | {"addresses": ["fl.example.org"]}, "addresses"),
        ("coordinator", COORDINATOR | {"tls": {"existingSecret": ""}}, "existingSecret"),
        ("coordinator", COORDINATOR | {"replicas": 2}, "replicas"),
        ("silo", SILO | {"existingSecret": ""}, "existingSecret"),
        ("silo", SILO | {"siloToml": ""}, "siloToml"),
        ("silo", SILO | {"files": {"../key.pem": "x"}}, "key.pem"),
        ("silo", SILO | {"image": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
    ],
)
def test_values_that_cannot_be_are_refused_by_name(
    chart: str, values: dict[str, Any], named: str
) -> None:
    with pytest.raises(helm_python.HelmError, match=named):
        helm_python.Chart.load(CHARTS / chart).validate_schema(values)


def test_the_coordinators_settings_are_what_coterie_reads(tmp_path: Path) -> None:
    settings = of_kind(render("coordinator", "study", COORDINATOR), "ConfigMap")["data"]
    (tmp_path / "coterie.toml").write_text(settings["coterie.toml"])
    made = federation.load(tmp_path)
    assert made.config.addresses == ["study:9092"]
    assert not made.is_open_to_operators_elsewhere


def test_nobody_connects_to_a_silo() -> None:
    policy = of_kind(render("silo", "study", SILO), "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"] and policy["ingress"] == []
    ports = {port["port"] for rule in policy["egress"] for port in rule["ports"]}
    assert ports == {53, 9092}


@pytest.mark.parametrize(
    ("chart", "values", "asked"),
    [
        ("coordinator", COORDINATOR, "coterie federation check"),
        ("silo", SILO, "coterie silo health"),
    ],
)
def test_who_is_ready_is_asked_of_the_health_command_and_a_warning_is_no_failure(
    chart: str, values: dict[str, Any], asked: str
) -> None:
    (main,) = pod(render(chart, "study", values))["containers"]
    shell, option, line = main["readinessProbe"]["exec"]["command"]
    assert (shell, option) == ("sh", "-c") and line.startswith(f"{asked};")
    for status, ready in ((0, True), (1, True), (2, False)):
        played = line.replace(asked, f"(exit {status})", 1)
        done = subprocess.run([shell, option, played], check=False)
        assert (done.returncode == 0) is ready
    # A restart mends neither a full disk nor an old certificate.
    assert "health" not in str(main["livenessProbe"])


def test_every_silo_in_a_container_has_shared_memory_for_workers() -> None:
    services = yaml.safe_load((CHARTS.parents[1] / "compose.yaml").read_text())["services"]
    silos = {name: service for name, service in services.items() if name.startswith("silo-")}
    assert len(silos) == 7 and {service["shm_size"] for service in silos.values()} == {"1g"}
    made = pod(render("silo", "study", SILO))
    (volume,) = [one["name"] for one in made["volumes"] if one.get("emptyDir", {}).get("medium")]
    mounts = {m["name"]: m["mountPath"] for m in made["containers"][0]["volumeMounts"]}
    assert mounts[volume] == "/dev/shm"


@pytest.mark.parametrize("files", [["compose.yaml"], ["compose.yaml", "docker/tls.yaml"]])
def test_containers_are_healthy_as_the_health_command_says(files: list[str]) -> None:
    root = CHARTS.parents[1]
    said: dict[str, Any] = {}
    for file in files:
        for name, service in yaml.safe_load((root / file).read_text())["services"].items():
            said.setdefault(name, {}).update(service)
    for name in ("superlink", "silo-1", "silo-7"):
        shell, line = said[name]["healthcheck"]["test"]
        asked = "coterie federation check" if name == "superlink" else "coterie silo health"
        assert shell == "CMD-SHELL" and line.startswith(asked) and line.endswith("$$? -lt 2")
    dockerfile = (root / "docker/Dockerfile").read_text()
    for asked in ('coterie federation check "$@"; test $? -lt 2', "coterie silo health --home"):
        assert asked in dockerfile


def test_charts_and_compose_name_the_version_of_the_package() -> None:
    root = CHARTS.parents[1]
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    for chart in ("coordinator", "silo"):
        assert f'appVersion: "{version}"' in (CHARTS / chart / "Chart.yaml").read_text()
    for file in ("compose.yaml", "docker/tls.yaml"):
        assert f"COTERIE_TAG:-{version}}}" in (root / file).read_text()
