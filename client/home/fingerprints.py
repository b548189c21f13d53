"""A fingerprint of a silo's training data, which shows others that the data have changed.

It is a keyed digest; its 32-byte key stays in the silo's folder. The fingerprints of one silo show
whether its data are the same, and nothing else: not even whether two silos have the same data.
"""

from __future__ import annotations

import hmac
import os
from pathlib import Path

from coterie.system.files import make_folder, write_atomically

FILE, KEY_BYTES = "data-mark.key", 32


def mark_of(home: str, data_hash: str) -> str:
    """Return 16 hexadecimal digits for the hash of all training data; empty if that is unknown.

    It is also empty for a silo without a folder, where no key can be kept.
    """
    if not home or not data_hash:
        return ""
    try:
        key = _key(Path(home) / FILE)
    except OSError:  # a folder that cannot be written
        return ""
    return hmac.digest(key, data_hash.encode(), "sha256").hex()[:16]


def _key(file: Path) -> bytes:
    """Return the silo's key, made once; a damaged file is replaced, as if the data had changed."""
    if file.exists() and len(key := file.read_bytes()) == KEY_BYTES:
        return key
    key = os.urandom(KEY_BYTES)
    make_folder(file.parent)
    write_atomically(file, key, private=True)
    return key
