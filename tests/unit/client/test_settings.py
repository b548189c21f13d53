"""What a silo is configured with when it starts."""

from __future__ import annotations

from typing import Any

import pytest

from coterie.client.home.settings import SettingsError, SiloSettings


@pytest.mark.parametrize("name", ["a", "hospital-b", "North_3.x", "9", "x" * 64])
def test_good_names_are_taken(name: str) -> None:
    assert SiloSettings(name).name == name


@pytest.mark.parametrize(
    "name", ["", "-a", ".a", "..", "a b", "a/b", "../a", "a\n", "é", "[red]", "<script>", "x" * 65]
)
def test_names_that_could_harm_a_file_or_a_page_are_refused(name: str) -> None:
    with pytest.raises(SettingsError, match="a silo's name"):
        SiloSettings(name)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"alpha": -1.0}, "alpha"),
        ({"alpha": float("nan")}, "alpha"),
        ({"alpha": float("inf")}, "alpha"),
        ({"threads": -1}, "threads"),
        ({"threads": 99999}, "threads must be 0 to 4096"),
        ({"device": "tpu"}, "device"),
        ({"device": "cuda:"}, "device"),
        ({"device": "cpu "}, "device"),
    ],
)
def test_settings_out_of_bounds_are_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        SiloSettings("a", **changes)


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:3"])
def test_devices_are_taken(device: str) -> None:
    assert SiloSettings("a", device=device).device == device


@pytest.mark.parametrize(
    "settings",
    [
        SiloSettings("a"),
        SiloSettings("b", task="own:Task", options={"data": "/x", "n": 3}, alpha=0.0, threads=4),
        SiloSettings("c", device="cuda:1", home="/var/lib/silo", alpha=12.5),
    ],
)
def test_settings_come_back_from_a_node_config(settings: SiloSettings) -> None:
    config = settings.to_node_config()
    assert all(isinstance(value, str | int | float | bool) for value in config.values())
    assert SiloSettings.from_node_config(config, node_id=1) == settings


def test_an_unknown_setting_is_refused_by_name() -> None:
    with pytest.raises(SettingsError, match="unknown setting 'colour'"):
        SiloSettings.from_node_config({"name": "a", "colour": "red"}, node_id=1)


@pytest.mark.parametrize(
    ("key", "value"), [("alpha", "high"), ("threads", "two"), ("threads", float("inf"))]
)
def test_a_setting_that_is_no_number_is_refused_by_name(key: str, value: str | float) -> None:
    with pytest.raises(SettingsError, match=key):
        SiloSettings.from_node_config({"name": "a", key: value}, node_id=1)


def test_flower_reads_a_name_of_digits_as_a_number_and_it_is_a_name_all_the_same() -> None:
    settings = SiloSettings.from_node_config({"name": 7, "keep-layers": 1}, node_id=1)
    assert (settings.name, settings.policy.keep_layers) == ("7", "1")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("min-group-size", 0, "min-group-size must be greater than or equal to 1. Got 0"),
        ("min-samples", "few", "min-samples must be a whole number. Got 'few'"),
        ("column-sums", "perhaps", "column-sums must be true or false. Got 'perhaps'"),
        ("secure", "yes", "secure must be '' or 'required'. Got 'yes'"),
    ],
)
def test_a_policy_out_of_bounds_is_refused_by_name(key: str, value: int | str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        SiloSettings.from_node_config({"name": "a", key: value}, node_id=1)


def test_a_node_without_a_name_is_called_by_its_id() -> None:
    settings = SiloSettings.from_node_config({}, node_id=42)
    assert (settings.name, settings.options) == ("node-42", {})


def test_simulated_nodes_share_no_digits() -> None:
    first, second = (
        SiloSettings.from_node_config({"partition-id": i, "num-partitions": 2}, node_id=9)
        for i in (0, 1)
    )
    assert (first.name, second.name) == ("silo-0", "silo-1")
    used = int(first.options["train"]) + int(first.options["test"])
    assert int(second.options["skip"]) >= int(first.options["skip"]) + used


def test_a_partition_does_not_replace_what_the_silo_was_given() -> None:
    settings = SiloSettings.from_node_config(
        {"partition-id": 3, "data.train": 5, "name": "a"}, node_id=9
    )
    assert (settings.name, settings.options) == ("a", {"train": 5})
