"""Accounts that may read a private key: one rule for silos, operators and the coordinator."""

from __future__ import annotations

import errno
import os
import pwd
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coterie.client.home.folder import create as create_silo
from coterie.client.home.settings import SettingsError
from coterie.server.site import coordinator, federation, operators
from coterie.server.site.certificates import private_key
from coterie.strategies.errors import FederationError
from coterie.system.keys import ANY, ENVIRONMENT, KeyFileError, read_key, remark
from tests.conftest import silo

POD = "KUBERNETES_SERVICE_HOST"


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(POD, raising=False)
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    return create_silo(tmp_path / "a", "a").key_file


def fails(number: int) -> Callable[..., None]:
    def chmod(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    return chmod


@pytest.mark.parametrize(
    ("mode", "chmod", "problem"),
    [
        (
            0o644,
            os.chmod,
            r"key\.pem may be read by accounts other than its owner. Run: chmod 600 \S+$",
        ),
        (0o640, os.chmod, r"Run: chmod 600 \S+$"),
        (
            0o777,
            lambda *_, **__: None,
            r"its file system does not store modes.*not below /mnt/c.*=any",
        ),
        (0o777, fails(errno.EPERM), r"its file system does not store modes"),
        (0o444, fails(errno.EROFS), r"is mounted read-only.*defaultMode 0400"),
    ],
)
def test_a_key_that_others_may_read_is_refused_with_what_helps_there(
    mode: int,
    chmod: Callable[..., None],
    problem: str,
    key: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    key.chmod(mode)
    with monkeypatch.context() as patched:
        patched.setattr(os, "chmod", chmod)
        with pytest.raises(KeyFileError, match=problem):
            read_key(key)
        for command in ("check", "start"):
            assert silo([command, "--home", str(key.parent)]) == 2
    assert "key.pem" in capsys.readouterr().err
    assert key.stat().st_mode & 0o777 == mode, "looking changes nothing"


def test_a_switch_allows_what_the_file_system_does_not_keep_and_says_so(
    key: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key.chmod(0o777)
    monkeypatch.setenv(ENVIRONMENT, ANY)
    read_key(key)
    assert silo(["check", "--home", str(key.parent)]) == 0
    assert capsys.readouterr().out.startswith("warning   every account on this machine may read")


@pytest.mark.parametrize(
    ("mode", "group", "pod", "account", "allowed"),
    [
        (0o600, False, False, True, True),
        (0o660, True, False, True, False),
        (0o660, True, True, True, True),  # fsGroup
        (0o640, True, False, False, True),  # a random user id
        (0o640, False, True, True, False),
        (0o664, True, True, False, False),
    ],
)
def test_a_group_may_read_a_key_in_a_pod_alone(
    mode: int,
    group: bool,
    pod: bool,
    account: bool,
    allowed: bool,
    key: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nobody(_: int) -> None:
        raise KeyError

    own = key.stat().st_gid
    key.chmod(mode)
    monkeypatch.setattr(os, "getegid", lambda: own + 1)
    monkeypatch.setattr(os, "getgroups", lambda: [own] if group else [own + 1])
    if pod:
        monkeypatch.setenv(POD, "10.0.0.1")
    if not account:
        monkeypatch.setattr(pwd, "getpwuid", nobody)
    if not allowed:
        with pytest.raises(KeyFileError, match="may be read by accounts other"):
            read_key(key)
        return
    read_key(key)
    assert ("the group of" in remark(key)) == (mode != 0o600)


RANDOM = f"""
import os, sys
from coterie.client.cli.main import app
def check():
    try:
        app(["check", "--home", sys.argv[1]], prog_name="coterie silo")
    except SystemExit as ended:
        return ended.code
os.environ["{ENVIRONMENT}"] = "{ANY}"
assert check() == 0  # loads what another account may not be able to read
del os.environ["{ENVIRONMENT}"]
os.environ["HOME"] = "/"
os.setgroups([]); os.setgid(0); os.setuid(1234567)
sys.exit(check())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another account")
def test_a_random_user_id_uses_a_folder_that_is_shared_with_its_group() -> None:
    with tempfile.TemporaryDirectory() as folder:  # tmp_path shuts others out
        home = create_silo(Path(folder) / "a", "a").folder
        subprocess.run(["chmod", "-R", "g+rwX", folder], check=True)
        subprocess.run(["chown", "-R", "7654321:0", folder], check=True)
        done = subprocess.run(
            [sys.executable, "-c", RANDOM, str(home)],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the group of") == 2


@pytest.mark.parametrize("name", ["tls/ca.key", "tls/server.key", "operator.key"])
def test_the_coordinator_follows_the_same_rule(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(POD, raising=False)
    made = federation.create(tmp_path / "study", ["localhost"])
    operators.local_identity(made)
    private_key(made.folder / name)
    (made.folder / name).chmod(0o640)
    with pytest.raises(FederationError, match=rf"{name} may be read by accounts other.*chmod 600"):
        coordinator.serve(made, print)
    said: list[str] = []
    monkeypatch.setenv(ENVIRONMENT, ANY)
    monkeypatch.setattr(coordinator, "_require_free", fails(errno.EADDRINUSE))
    with pytest.raises(OSError, match="in use"):
        coordinator.serve(made, said.append)
    assert len(said) == 1 and said[0].startswith("WARNING: ") and name in said[0]


@pytest.mark.parametrize("mask", [0o000, 0o077])
def test_a_new_key_is_its_owners_whatever_the_umask(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        key = create_silo(tmp_path / "a", "a").key_file
        made = federation.create(tmp_path / "study", ["localhost"])
    finally:
        os.umask(before)
    for file in (key, made.tls / "ca.key", made.tls / "server.key"):
        assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("content", [b"", b"-----BEGIN PRIVATE KEY-----"])
def test_a_damaged_key_is_said(content: bytes, key: Path) -> None:
    key.write_bytes(content)
    with pytest.raises(SettingsError, match=r"key\.pem cannot be read"):
        create_silo(key.parent, "a").key()
