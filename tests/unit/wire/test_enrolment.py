"""Requests and bundles arrive as they were made, or are refused with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st

from coterie.server.site.certificates import make_ca
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
    from coterie.wire import enrolment

    fields = enrolment._fields("coterie-request", REQUEST)
    forged = enrolment._line("coterie-request", {**fields, "name": "hospital-c"})
    with pytest.raises(EnrolmentError, match="its signature does not match"):
        read_request(forged)


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
