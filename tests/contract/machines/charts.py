"""The Helm charts, rendered by Helm itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helm_python
import yaml

CHARTS = Path(__file__).parents[3] / "docker/chart"
KUBERNETES = ("1.28", "1.37")
"""The oldest and the newest whose schemas the manifests are held against."""
COORDINATOR: dict[str, Any] = {"addresses": ["study:9092"], "tls": {"existingSecret": "study-ca"}}
SILO: dict[str, Any] = {
    "siloToml": 'name = "hospital-a"\ntask = "digits"\n',
    "existingSecret": "hospital-a",
}


def render(chart: str, release: str, values: dict[str, Any]) -> list[dict[str, Any]]:
    """The manifests that `helm install RELEASE CHART` would send, with these values."""
    loaded = helm_python.Chart.load(CHARTS / chart)
    texts = loaded.render(values, name=release, namespace="study")
    return [
        manifest
        for name, text in sorted(texts.items())
        if name.endswith(".yaml")
        for manifest in yaml.safe_load_all(text)
        if manifest
    ]
