"""The coordinator's folder: what is made, what is refused, and certificates."""

from __future__ import annotations

import dataclasses
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from coterie.server.machine.link import control
from coterie.server.machine.superlink import Ports, environment
from coterie.server.site import certificates, enrolled
from coterie.server.site.federation import Federation, create, find, load
from coterie.server.site.operator import enrol_silo, print_roster, remove_silo
from coterie.strategies.errors import FederationError
from coterie.system.ports import join_address
from coterie.wire.enrolment import fingerprint_of_key, make_request, public_pem, read_bundle
from tests.commands import coterie


def test_init_makes_a_folder_that_only_its_owner_reads(tmp_path: Path) -> None:
    made = create(tmp_path / "study", ["fl.example.org", "10.0.0.5:7777"])
    assert made.config.addresses == ["fl.example.org:9092", "10.0.0.5:7777"]
    assert made.control_address == "127.0.0.1:9093"
    assert not made.is_open_to_operators_elsewhere
    assert (tmp_path / "study").stat().st_mode & 0o077 == 0
    for key in made.tls.glob("*.key"):
        assert key.stat().st_mode & 0o077 == 0
    with pytest.raises(FederationError, match="is a federation already"):
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
    assert made.renew_certificate(always=True) == "you asked for it"
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
    assert "different addresses" in load(tmp_path).renew_certificate()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            ("database = true", "databse = true"),
            "unknown key 'state.databse': the nearest is database",
        ),
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


def test_an_address_that_cannot_be_one_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(FederationError, match="must be HOST:PORT"):
        create(tmp_path / "study", ["http://fl.example.org"])
    for port in ("0", "99999"):
        said = f"the port must be 1 to 65535. Got 'host:{port}'"
        with pytest.raises(FederationError, match=said):
            create(tmp_path / "study", [f"host:{port}"])
    assert not (tmp_path / "study").exists()


def test_the_folder_is_named_by_argument_environment_or_where_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COTERIE_FEDERATION", raising=False)
    assert find(None) is None
    with pytest.raises(FederationError, match="is not a federation"):
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


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Federation]:
    """Another federation, whose server listens at the operators' port."""
    made = create(tmp_path / "other", ["localhost"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.tls / "server.pem", made.tls / "server.key")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]

        def serve() -> None:
            with suppress(OSError):
                while True:
                    with suppress(ssl.SSLError), listening.accept()[0] as accepted:
                        accepted.settimeout(5)
                        context.wrap_socket(accepted, server_side=True).close()

        server = threading.Thread(target=serve, daemon=True)
        server.start()
        yield dataclasses.replace(
            made, config=made.config.model_copy(update={"listen": _at(made, port)})
        )
        listening.shutdown(socket.SHUT_RDWR)
    server.join(5)


def _at(made: Federation, port: int) -> Any:
    return made.config.listen.model_copy(update={"operators": f"127.0.0.1:{port}"})


@pytest.fixture
def beside(other: Federation, tmp_path: Path) -> Federation:
    """A federation whose operators' port is the other's."""
    port = int(other.control_address.rpartition(":")[2])
    return create(tmp_path / "own", ["localhost"], control_port=port)


def request(name: str) -> tuple[str, str]:
    """The line that a silo sends, and its key's fingerprint."""
    key = ec.generate_private_key(ec.SECP384R1())
    return make_request(name, key), fingerprint_of_key(public_pem(key.public_key()))


def test_a_silo_is_enrolled_and_removed_where_another_superlink_has_the_port(
    beside: Federation, capsys: pytest.CaptureFixture[str]
) -> None:
    lines, bundle = enrol_silo(beside, request("hospital-b")[0])
    remove = "coterie members remove hospital-b"
    assert f"{remove} --federation {beside.folder}" in "\n".join(lines)
    assert read_bundle(bundle).name == "hospital-b"
    said = "\n".join(lines)
    assert "the server at" in said and "that the CA in" in said
    assert "The silo will be accepted after the SuperLink's next start." in said
    print_roster(beside)
    printed = capsys.readouterr()
    assert "unknown" in printed.out and "The SuperLink could not be notified:" in printed.err
    with pytest.raises(
        FederationError, match=r"(?s)is removed.*not be notified.*is refused from then on\."
    ):
        remove_silo(beside, "hospital-b")
    assert [bool(entry.removed) for entry in enrolled.read(beside.roster)] == [True]


def test_a_server_of_the_ca_is_trusted_and_one_of_another_is_told_from_silence(
    other: Federation, beside: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coterie.server.machine.link.CONNECT_DEADLINE_S", 0.3)
    address = other.control_address
    with (
        pytest.raises(FederationError, match="the server"),
        control(address, root_certificates=beside.ca),
    ):
        pass
    for ca, said in ((other.ca, "does not speak TLS, or is busy"), (None, "may require TLS")):
        with pytest.raises(FederationError, match=said), control(address, root_certificates=ca):
            pass
    nowhere = f"127.0.0.1:{Ports.free().control}"
    with (
        pytest.raises(FederationError, match=f"superlink --federation {beside.folder}`"),
        control(nowhere, root_certificates=beside.ca),
    ):
        pass
    with (
        pytest.raises(FederationError, match="Start one with `coterie superlink`"),
        control(nowhere),
    ):
        pass
    with (
        pytest.raises(FederationError, match="contains no certificate"),
        control(address, root_certificates=beside.folder / "coterie.toml"),
    ):
        pass
    (beside.folder / "bytes").write_bytes(b"\xff")
    with (
        pytest.raises(FederationError, match="contains no certificate"),
        control(address, root_certificates=beside.folder / "bytes"),
    ):
        pass


def test_names_and_fingerprints_are_never_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = create(tmp_path, ["localhost"], control_port=Ports.free().control)
    name = "department-of-radiology-of-the-university-hospital-of-northtown"
    line, fingerprint = request(name)
    enrol_silo(made, line)
    print_roster(made)
    (row,) = [text for text in capsys.readouterr().out.splitlines() if name in text]
    assert fingerprint in row
    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # as on a terminal
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    print_roster(made)
    lines = [text.strip() for text in capsys.readouterr().out.splitlines()]
    assert "…" not in "".join(lines) and len(lines) > 2, "it folds"


@pytest.mark.parametrize("address", ["::1", "[::1]", "[::1]:9092", "fl.example.org", "10.0.0.1"])
def test_an_address_is_taken_in_every_form(address: str, tmp_path: Path) -> None:
    made = create(tmp_path / "study", [address], operators="::")
    bare = address.removesuffix(":9092").strip("[]") if "[" in address else address
    assert made.config.addresses == [join_address(bare, 9092)] and made.names == [bare]
    assert made.config.listen.silos == ("[::]:9092" if ":" in bare else "0.0.0.0:9092")
    assert made.control_address == "[::1]:9093" and made.is_open_to_operators_elsewhere
    file = made.folder / "coterie.toml"
    file.write_text(file.read_text().replace('"[::]:9093"', '"::1:9093"'))
    assert load(made.folder).config.listen.operators == "[::1]:9093"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["status", "--superlink", "::1:9093"], "is ambiguous: write [::1]:9093"),
        (["status", "--superlink", "http://a"], "must be HOST:PORT"),
        (["superlink", "--host", "[::1"], "must be a name or an IP address"),
        (["silo", "serve", "--name", "a", "--superlink", "a:0"], "the port must be 1 to 65535"),
        (["executor", "--superlink", "a b"], "must be HOST:PORT"),
    ],
)
def test_a_command_refuses_what_is_no_address(line: list[str], said: str) -> None:
    done = coterie(*line)
    assert done.returncode == 2 and said in " ".join(done.stderr.split())
