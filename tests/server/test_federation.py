"""The coordinator's folder: what is made, what is refused, and certificates."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from server import certificates
from server.federation import create, find, load
from server.superlink import environment
from strategies.errors import FederationError


def test_init_makes_a_folder_that_only_its_owner_reads(tmp_path: Path) -> None:
    made = create(tmp_path / "study", ["fl.example.org", "10.0.0.5:7777"])
    assert made.config.addresses == ["fl.example.org:9092", "10.0.0.5:7777"]
    assert made.control_address == "127.0.0.1:9093"
    assert not made.is_open_to_operators_elsewhere
    assert (tmp_path / "study").stat().st_mode & 0o077 == 0
    for key in made.tls.glob("*.key"):
        assert key.stat().st_mode & 0o077 == 0
    with pytest.raises(FederationError, match="holds a federation already"):
        create(tmp_path / "study", ["fl.example.org"])


def test_the_certificate_is_valid_for_the_names_given_and_this_machine(tmp_path: Path) -> None:
    made = create(tmp_path, ["fl.example.org", "10.0.0.5", "fe80::1"])
    certificate = made.tls / "server.pem"
    held = ["fl.example.org", "10.0.0.5", "fe80::1", "localhost", "127.0.0.1"]
    assert certificates.covers(certificate, held)
    assert not certificates.covers(certificate, ["other.example.org"])
    assert 390 < certificates.days_left(certificate) < 400
    assert certificates.days_left(made.ca) > 3600
    ssl.create_default_context(cafile=made.ca)  # OpenSSL takes it for a CA


def test_renewal_keeps_the_ca_so_that_silos_need_nothing(tmp_path: Path) -> None:
    made = create(tmp_path, ["fl.example.org"])
    ca, server = made.ca.read_bytes(), (made.tls / "server.pem").read_bytes()
    assert made.renew_certificate() == ""
    assert made.renew_certificate(always=True) == "asked for"
    assert made.ca.read_bytes() == ca
    assert (made.tls / "server.pem").read_bytes() != server


def test_a_certificate_that_ends_soon_or_lacks_a_name_is_renewed_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = create(tmp_path, ["fl.example.org"])
    monkeypatch.setattr(certificates, "SERVER_DAYS", 20)
    made.renew_certificate(always=True)
    monkeypatch.undo()
    assert "20 days left" in made.renew_certificate()
    text = (tmp_path / "coterie.toml").read_text()
    (tmp_path / "coterie.toml").write_text(text.replace("fl.example.org", "new.example.org"))
    assert "other addresses" in load(tmp_path).renew_certificate()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("database = true", "databse = true"), "state.databse: there is no such key"),
        (('silos = "0.0.0.0:9092"', 'silos = "here"'), "listen.silos: must be HOST:PORT"),
        (("[listen]", "[listen"), "is not TOML"),
        (('addresses = ["fl.example.org:9092"]', "addresses = []"), "addresses"),
    ],
)
def test_a_wrong_configuration_is_named(change: tuple[str, str], said: str, tmp_path: Path) -> None:
    create(tmp_path, ["fl.example.org"])
    file = tmp_path / "coterie.toml"
    text = file.read_text()
    assert change[0] in text
    file.write_text(text.replace(*change))
    with pytest.raises(FederationError, match=said):
        load(tmp_path)


def test_a_configuration_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    made = create(tmp_path, ["fl.example.org"])
    file = tmp_path / "coterie.toml"
    file.write_bytes(file.read_text().encode("utf-8-sig"))
    assert load(tmp_path).config == made.config


def test_an_address_that_cannot_be_one_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(FederationError, match="must be HOST:PORT"):
        create(tmp_path / "study", ["http://fl.example.org"])
    for port in ("0", "99999"):
        said = f"the port must be from 1 to 65535. Got 'host:{port}'"
        with pytest.raises(FederationError, match=said):
            create(tmp_path / "study", [f"host:{port}"])
    assert not (tmp_path / "study").exists()


def test_the_folder_is_named_by_argument_environment_or_where_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COTERIE_FEDERATION", raising=False)
    assert find(None) is None
    with pytest.raises(FederationError, match="holds no federation"):
        find(tmp_path)
    made = create(tmp_path / "study", ["fl.example.org"])
    monkeypatch.setenv("COTERIE_FEDERATION", str(made.folder))
    assert find(None) == made
    monkeypatch.delenv("COTERIE_FEDERATION")
    monkeypatch.chdir(made.folder)
    assert find(None) == made


def test_another_superlink_does_not_take_the_user_s_federation_for_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a demo's ServerApp would look for its silos in that federation's list."""
    monkeypatch.setenv("COTERIE_FEDERATION", str(tmp_path))
    assert "COTERIE_FEDERATION" not in environment(tmp_path)
