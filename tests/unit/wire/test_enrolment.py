"""Requests and bundles arrive as they were made, or are refused with what to do."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from hypothesis import given
from hypothesis import strategies as st

from coterie.server.site.certificates import make_ca
from coterie.wire import enrolment
from coterie.wire.enrolment import (
    Bundle,
    EnrolmentError,
    fingerprint_of_key,
    make_request,
    public_pem,
    read_bundle,
    read_request,
    write_bundle,
)

KEY = ec.generate_private_key(ec.SECP384R1())
REQUEST = make_request("hospital-b", KEY)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("ca")
    make_ca(folder, "study")
    silo = fingerprint_of_key(public_pem(KEY.public_key()))
    return Bundle("hospital-b", silo, "fl.example.org:9092", (folder / "ca.pem").read_bytes())


def test_a_request_is_read_as_it_was_made_also_when_a_mail_program_wrapped_it() -> None:
    wrapped = "\r\n ".join(REQUEST[i : i + 72] for i in range(0, len(REQUEST), 72))
    for text in (REQUEST, wrapped + "\n"):
        request = read_request(text)
        assert request.name == "hospital-b"
        assert request.key == public_pem(KEY.public_key())


def test_the_private_key_is_not_in_the_request() -> None:
    number = KEY.private_numbers().private_value
    assert "PRIVATE" not in REQUEST and str(number) not in REQUEST


@given(st.integers(0, len(REQUEST) - 1), st.sampled_from("Ab0-_."))
def test_no_change_of_a_character_goes_unseen(position: int, character: str) -> None:
    changed = REQUEST[:position] + character + REQUEST[position + 1 :]
    if changed == REQUEST:
        return
    try:  # unused bits of the last character are the one thing that may differ
        assert read_request(changed) == read_request(REQUEST)
        assert position == len(REQUEST) - 1
    except EnrolmentError:
        pass


@given(st.integers(0, len(REQUEST) - 1))
def test_a_line_that_was_cut_is_refused(length: int) -> None:
    with pytest.raises(EnrolmentError):
        read_request(REQUEST[:length])


@given(st.text(max_size=60))
def test_anything_else_is_refused(text: str) -> None:
    for read in (read_request, read_bundle):
        for prefix in ("", "coterie-request.", "coterie-join."):
            with pytest.raises(EnrolmentError):
                read(prefix + text)


def test_a_name_cannot_be_put_on_another_s_signature() -> None:
    """The signature covers the name: the line is rebuilt with a right checksum, and refused."""
    fields = enrolment._fields("coterie-request", REQUEST)
    forged = enrolment._line("coterie-request", {**fields, "name": "hospital-c"})
    with pytest.raises(EnrolmentError, match="its signature does not match"):
        read_request(forged)


def test_a_key_has_one_text_however_it_is_written() -> None:
    """By its text a removed key is known again."""
    written = b"a note\n" + public_pem(KEY.public_key())
    signed = KEY.sign(enrolment._signed("coterie-request", "b", written), ec.ECDSA(SHA256()))
    fields = {"key": written.decode(), "signature": base64.b64encode(signed).decode()}
    request = read_request(enrolment._line("coterie-request", {"name": "b", **fields}))
    assert request.key == public_pem(KEY.public_key())


def test_a_key_of_another_kind_and_a_deep_line_are_refused() -> None:
    odd = base64.b64decode("".join(public_pem(KEY.public_key()).decode().splitlines()[1:-1]))
    unknown = odd.replace(bytes.fromhex("2b81040022"), bytes.fromhex("2a81040022"))  # the curve
    text = f"-----BEGIN PUBLIC KEY-----\n{base64.encodebytes(unknown).decode()}"
    key = {"name": "b", "key": f"{text}-----END PUBLIC KEY-----\n", "signature": ""}
    deep = b"[" * 100_000
    line = base64.urlsafe_b64encode(hashlib.sha256(deep).digest()[:4] + deep).decode()
    for request in (enrolment._line("coterie-request", key), f"coterie-request.{line}"):
        with pytest.raises(EnrolmentError, match="is incomplete or altered"):
            read_request(request)


def test_a_bundle_is_read_as_it_was_made(bundle: Bundle) -> None:
    assert read_bundle(write_bundle(bundle)) == bundle


def test_a_request_is_not_taken_for_a_bundle(bundle: Bundle) -> None:
    with pytest.raises(EnrolmentError, match="This is an enrolment request"):
        read_bundle(REQUEST)
    with pytest.raises(EnrolmentError, match="This is a join bundle"):
        read_request(write_bundle(bundle))


def test_fingerprints_are_short_enough_to_be_read_aloud() -> None:
    one = fingerprint_of_key(public_pem(KEY.public_key()))
    other = fingerprint_of_key(public_pem(ec.generate_private_key(ec.SECP384R1()).public_key()))
    assert one != other
    assert len(one.split("-")) == 8 and all(len(part) == 4 for part in one.split("-"))


def test_no_secret_is_in_the_repository_s_example(bundle: Bundle, tmp_path: Path) -> None:
    assert "PRIVATE" not in write_bundle(bundle)
