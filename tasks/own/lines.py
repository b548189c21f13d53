"""The text of a CSV file: its encoding, its header, and its line ends.

Programs write lines above the column names (``sep=;``, a title) and below the last row (totals),
end every row with a separator, and leave double quotes open. This module detects that before a row
is read.
"""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coterie.tasks.base import TaskError
from coterie.tasks.own.dialect import Dialect
from coterie.tasks.text import encoding_by_bom

CHUNK, NAMES = 1 << 20, 1 << 26
"""Bytes read at once; most bytes in which the names of the columns are looked for."""
BEYOND = "\n"
"""Name of an extra last column, which must be empty, if separators end every row."""
LOOKED = 20
"""First lines of a file to search for column names."""
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
"""File ending → pyarrow's name of the compression."""
BREAK = rb"\r\n|\r|\n"


class Lines(io.RawIOBase):
    """The rows of a CSV file as UTF-8, without the header, for pyarrow to read.

    Attributes:
        separator: of the file; ``sep=`` in its first line overrides the silo's option.
        count: non-empty lines read so far.
        breaks: line ends read so far.
        above: lines above the first row.
        about: estimated number of rows, from the file size; 0 if unknown.
        looked: the first lines of the file.
    """

    def __init__(self, place: Path, dialect: Dialect) -> None:
        self.count = self.breaks = 0
        self._begins = True
        self._held = bytearray()
        chunks = _decoded(_raw(place), dialect.encoding)
        head = next(chunks, b"")
        while len(head) < NAMES and len(re.findall(BREAK, head)) < dialect.skip + 2:
            if not (more := next(chunks, b"")):
                break
            head += more  # the names alone may take megabytes
        named = re.match(rb'"?sep=([^"\r\n])"?(?:' + BREAK + b"|$)", head, re.IGNORECASE)
        self.separator = named[1].decode() if named else dialect.separator
        self.looked = head[: 1 << 16].decode(errors="replace").splitlines()[:LOOKED]
        skipped = max(dialect.skip, 1 if named else 0)
        ends = [0, *(found.end() for found in re.finditer(BREAK, head))]
        start = ends[skipped] if skipped < len(ends) else len(head)
        self.names, rows, lines = _names(head[start:], self.separator, dialect.quote)
        self.above = skipped + lines
        if any(len(name.splitlines()) > LOOKED for name in self.names):
            raise TaskError(_stray(place, skipped + 1, dialect.quote, closed=False))
        packed = place.suffix.lower() in COMPRESSIONS
        self.about = 0 if packed else place.stat().st_size * len(ends) // max(len(head), 1)
        self._chunks = self._counted(_rest(chunks, head[start + rows :], dialect.skip_last))

    @property
    def empty(self) -> int:
        """The number of empty lines read so far."""
        return self.breaks - self.count + (not self._begins)

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        """Return up to ``size`` bytes; fewer only at the end."""
        while size < 0 or len(self._held) < size:
            if not (chunk := next(self._chunks, b"")):
                size = len(self._held)
            self._held += chunk
        found = bytes(self._held[:size])
        del self._held[:size]
        return found

    def _counted(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        for chunk in filter(None, chunks):
            text = np.frombuffer(chunk, np.uint8)
            breaks = (text == 10) | (text == 13)
            begin = np.count_nonzero(breaks[:-1] & ~breaks[1:])
            self.count += int(begin) + int(self._begins and not breaks[0])
            self.breaks += chunk.count(b"\n") or chunk.count(b"\r")
            self._begins = bool(breaks[-1])
            yield chunk


def _raw(place: Path) -> Iterator[bytes]:
    """Yield the file's bytes, decompressed if its ending requires it."""
    import pyarrow as pa

    compression = COMPRESSIONS.get(place.suffix.lower())
    with pa.input_stream(str(place), compression=compression) as stream:
        while chunk := stream.read(CHUNK):
            yield chunk


def _decoded(chunks: Iterator[bytes], encoding: str) -> Iterator[bytes]:
    """Yield the bytes in UTF-8, or raise ``UnicodeDecodeError``.

    UTF-8 input is passed on unchecked: pyarrow reports its errors.
    """
    first = next(chunks, b"")
    encoding = encoding_by_bom(first) or encoding
    if encoding in ("utf-8", "utf-8-sig"):
        yield first.removeprefix(codecs.BOM_UTF8)
        yield from chunks
        return
    for text in codecs.iterdecode(_chain(first, chunks), encoding):
        yield text.encode()


def _chain(first: bytes, chunks: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from chunks


def _names(head: bytes, separator: str, quote: str) -> tuple[list[str], int, int]:
    """Return the column names, and the number of bytes and lines that they take.

    If a separator ends every row but not the header, a column ``BEYOND`` is added; if it ends only
    the header, the last name is left out.
    """
    text = io.StringIO(head.decode(errors="replace"), newline="")
    lines = list(text)
    read = csv.reader(
        lines, delimiter=separator, quotechar=quote or None,
        quoting=csv.QUOTE_MINIMAL if quote else csv.QUOTE_NONE,
    )  # fmt: skip
    csv.field_size_limit(max(len(head), csv.field_size_limit()))
    names = next((record for record in read if record), [])
    above = read.line_num
    first = next((record for record in read if record), names)
    if len(first) == len(names) + 1 and not first[-1]:
        names = [*names, BEYOND]
    elif len(first) == len(names) - 1 and not names[-1]:
        names = names[:-1]
    ends = [0, *(found.end() for found in re.finditer(BREAK, head)), len(head)]
    return names, ends[above], above


def _rest(chunks: Iterator[bytes], first: bytes, count: int) -> Iterator[bytes]:
    """Yield all chunks without the last ``count`` non-empty lines."""
    if not count:
        yield from _chain(first, chunks)
        return
    held = b""
    for chunk in _chain(first, chunks):
        held += chunk
        kept = _before_last(held, count)
        yield held[:kept]
        held = held[kept:]


def _before_last(text: bytes, count: int) -> int:
    """Return where the last ``count`` non-empty lines begin."""
    begins = [found.start() for found in re.finditer(rb"(?<![^\r\n])[^\r\n]+", text)]
    return begins[-count] if len(begins) >= count else 0


@dataclass(frozen=True)
class Broken:
    """Rows of a CSV file with line breaks in quoted values.

    ``rows`` counts them; the first such value begins at ``line`` of the file. ``joined`` counts
    values with as many separators as whole rows would have; the first begins at ``joined_line``.
    """

    rows: int = 0
    line: int = 0
    joined: int = 0
    joined_line: int = 0


def broken_rows(place: Path, dialect: Dialect) -> Broken:
    """Find line breaks in quotes.

    Raises ``TaskError`` if a quote is never closed, or text follows the closing quote: then it was
    an ordinary character and has swallowed rows.
    """
    lines = Lines(place, dialect)
    text, separator, quote = lines.read(), lines.separator.encode(), dialect.quote
    at, line, rows = 0, lines.above + 1, 0
    begins, joined = [], []
    for found in _quoted(separator, quote.encode()).finditer(text):
        if not (inside := _count_breaks(found[1])):
            continue
        passed = _count_breaks(text[at : found.start()])
        line += passed
        if not found[2] or found[3].strip():
            raise TaskError(_stray(place, line, quote, closed=bool(found[2])))
        begins.append(line)
        rows += bool(passed) or rows == 0
        if found[1].count(separator) == inside * (len(lines.names) - 1) > 0:
            joined.append(line)
        line += inside
        at = found.end()
    return Broken(rows, min(begins, default=0), len(joined), min(joined, default=0))


def _quoted(separator: bytes, quote: bytes) -> re.Pattern[bytes]:
    """Return a pattern of a quoted value: its text, the closing quote, and what follows."""
    ends, q = re.escape(separator) + rb"\r\n", re.escape(quote)
    return re.compile(
        rb"(?:(?<=[%b])|\A)%b([^%b]*+(?:%b[^%b]*+)*+)(%b|\Z)([^%b]*)"
        % (ends, q, q, q + q, q, q, ends)
    )


def _count_breaks(text: bytes) -> int:
    return sum(1 for _ in re.finditer(BREAK, text))


def _stray(place: Path, line: int, quote: str, *, closed: bool) -> str:
    what = "ends in the middle of a value" if closed else "is never closed"
    return (
        f"{str(place)!r} has a {quote} in line {line} of the file that {what}, several lines "
        f"later: rows would be lost. Write a {quote} within a quoted value twice ({quote * 2}). If "
        'nothing in the file is quoted, set the silo\'s option quote = "".'
    )
