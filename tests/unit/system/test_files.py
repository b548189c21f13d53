"""Files that are written whole or not at all, and locks."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coterie.system import files
from coterie.system.files import (
    LockedError,
    append_line,
    explained,
    held_by,
    locked,
    make_folder,
    replacing,
    write_atomically,
    write_named,
)


def fail(*_: Any) -> int:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("call", ["open", "write", "fsync", "replace"])
def test_a_write_that_fails_leaves_the_last_good_file_and_nothing_else(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "run.json"
    write_atomically(target, b"good")
    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space"):
        patched.setattr(os, call, fail)
        write_atomically(target, b"half of it")
    assert target.read_bytes() == b"good"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("write", "card: No space left on device. Free space on its disk, or name a folder"),
        ("open", "card: No space left on device. Free space on its disk"),
    ],
)
def test_a_full_disk_is_told_with_the_file_that_a_person_knows(
    call: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space") as caught:
        patched.setattr(os, call, fail)
        write_atomically(tmp_path / "card", b"half of it")
    assert explained(caught.value).startswith(f"{tmp_path}/{text}")


@pytest.mark.parametrize(
    ("number", "advice"),
    [(30, "Name a folder on a disk that can be written."), (13, "Give this account"), (2, "tory.")],
)
def test_an_error_of_a_file_says_what_to_do(number: int, advice: str) -> None:
    assert advice in explained(OSError(number, os.strerror(number), "out/card"))


def test_an_error_without_a_file_stays_as_it_is() -> None:
    assert explained(OSError("no certificate")) == "no certificate"
    assert explained(OSError(28, "No space")) == "[Errno 28] No space"


def test_a_named_file_may_be_a_link_or_a_pipe_and_no_folder(tmp_path: Path) -> None:
    (tmp_path / "kept").write_bytes(b"old")
    (tmp_path / "link").symlink_to("kept")
    write_named(tmp_path / "link", b"new")
    assert (tmp_path / "kept").read_bytes() == b"new" and (tmp_path / "link").is_symlink()
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as read, os.fdopen(writing, "wb"):
        write_named(Path(f"/dev/fd/{writing}"), b"through")
        assert read.read(7) == b"through"
    with pytest.raises(IsADirectoryError) as caught:
        write_named(tmp_path, b"new")
    assert explained(caught.value).startswith(f"{tmp_path}: Is a directory. Name a file")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["kept", "link"]


def test_an_interrupted_block_changes_nothing(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a", b"good")
    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "a") as unfinished:
        unfinished.write_bytes(b"half")
        raise KeyboardInterrupt
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"good"]


def test_processes_that_write_one_file_at_the_same_time_each_write_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with replacing(tmp_path / "a") as unfinished:
        unfinished.write_bytes(b"fir")
        with monkeypatch.context() as patched:
            patched.setattr(os, "getpid", lambda: 2**22 + 1)
            write_atomically(tmp_path / "a", b"second")
        assert (tmp_path / "a").read_bytes() == b"second"
        with unfinished.open("ab") as file:
            file.write(b"st")
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"first"]


def test_what_killed_processes_left_of_a_file_goes_with_its_next_version(tmp_path: Path) -> None:
    old, new = (tmp_path / f"[a].{number}.tmp" for number in (2**22 + 1, 2**22 + 2))
    for left in (old, new):
        left.write_bytes(b"cut o")
    os.utime(old, (0, 0))
    write_atomically(tmp_path / "[a]", b"whole")
    assert {file.name for file in tmp_path.iterdir()} == {"[a]", new.name}


def test_a_disk_that_takes_a_few_bytes_at_a_time_gets_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write: Callable[[int, Any], int] = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]))
    write_atomically(tmp_path / "a", b"0123456789")
    append_line(tmp_path / "b", b"0123456789", synced=True)
    monkeypatch.undo()
    assert (tmp_path / "a").read_bytes() + b"\n" == (tmp_path / "b").read_bytes() == b"0123456789\n"


def test_only_the_owner_reads_what_is_private(tmp_path: Path) -> None:
    left = tmp_path / f"key.{os.getpid()}.tmp"  # ids are given again
    left.write_bytes(b"left by a process that was killed")
    left.chmod(0o666)
    before = os.umask(0o022)
    try:
        write_atomically(tmp_path / "key", b"secret", private=True)
        write_atomically(tmp_path / "card", b"open")
        make_folder(tmp_path / "a" / "b", private=True)
    finally:
        os.umask(before)
    modes = {p.name: p.stat().st_mode & 0o777 for p in (*tmp_path.iterdir(), tmp_path / "a" / "b")}
    assert modes == {"key": 0o600, "card": 0o644, "a": 0o755, "b": 0o700}


def test_a_line_after_one_that_was_cut_off_begins_anew(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    append_line(file, b"one", synced=False)
    with file.open("ab") as opened:
        opened.write(b"tw")
    append_line(file, b"three", synced=True)
    assert file.read_bytes() == b"one\ntw\nthree\n"


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        make_folder(tmp_path / "file")
    with pytest.raises(NotADirectoryError):
        make_folder(tmp_path / "file" / "a" / "b")


HOLDER = """
import sys; from pathlib import Path; from coterie.system.files import locked
with locked(Path(sys.argv[1])):
    print(flush=True); sys.stdin.read()
"""


def test_a_lock_is_held_by_one_process_and_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "LOOK_S", 0.01)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None and holder.stdin is not None
    try:
        holder.stdout.readline()
        assert held_by(tmp_path) == holder.pid
        for deadline_s in (0.0, 0.05):
            with (
                pytest.raises(LockedError, match=f"locked by process {holder.pid}$"),
                locked(tmp_path, deadline_s=deadline_s),
            ):
                pass
        with locked(tmp_path, name="other.lock"):
            pass
    finally:
        holder.kill()
        holder.communicate(timeout=60)
    with locked(tmp_path, deadline_s=60):
        assert held_by(tmp_path) == os.getpid()
    assert held_by(tmp_path) is None
    with (tmp_path / "lock").open() as glance:  # as `held_by` of another process
        fcntl.flock(glance, fcntl.LOCK_SH)
        monkeypatch.setattr(time, "sleep", lambda _: glance.close())
        with locked(tmp_path):
            assert glance.closed
