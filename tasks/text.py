"""Text files as Windows writes them: a byte order mark gives the encoding."""

from __future__ import annotations

import codecs
from pathlib import Path

BOMS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",  # begins as UTF-16 does
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


def encoding_by_bom(start: bytes) -> str | None:
    """Return the encoding that a file's byte order mark gives, or None."""
    return next((name for mark, name in BOMS.items() if start.startswith(mark)), None)


def read_text(file: Path) -> str:
    """Read a whole file: UTF-8, or the encoding that its byte order mark gives.

    Raises ``OSError`` or ``UnicodeDecodeError``.
    """
    raw = file.read_bytes()
    return raw.decode(encoding_by_bom(raw) or "utf-8").replace("\r\n", "\n").replace("\r", "\n")
