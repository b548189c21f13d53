"""What a silo states of one training in a secure run, signs, and sends with its reply.

The coordinator forwards all statements with a sum, so that no silo has to believe the coordinator
about the others.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from numpy.typing import NDArray

from coterie.wire.description import is_silo_name
from coterie.wire.errors import WireError

MOST_CHARACTERS: Final = 2**17
"""Longest statement: of a block with 1,024 silos of the longest names."""
MOST_SILOS: Final = 1024
_SIGNED: Final = b"coterie training of a secure run 1\n"
_DIGEST, _MARK = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{32}")

Block = tuple[tuple[str, float], ...]
"""Silos in order, each with the samples that it counts for: all of them are in a sum, or none is
(So, Ali, Güler, Jiao, Avestimehr: "Securing Secure Aggregation: Mitigating Multi-Round Privacy
Leakage in Federated Learning", AAAI 2023, https://arxiv.org/abs/2106.03328)."""


@dataclass(frozen=True)
class Statement:
    """One training, as its silo states it.

    Attributes:
        trained_as: digest of all that decided it, 64 hexadecimal digits.
        made: mark of its outcome by a key of the silo, 32 hexadecimal digits.
        samples: training samples, by which the silo is weighted.
        length: Euclidean length of the update, in three digits, rounded up.
        reach: sum of the lengths since the last model from the coordinator, rounded up alike.
        block: the silos that this one is in sums with; empty if it is still free.
        signature: by the key that the silo was enrolled with, in hexadecimal digits; empty if it
            was not.
    """

    trained_as: str
    made: str
    samples: int
    length: float
    reach: float
    block: Block = ()
    signature: str = ""

    def content(self, run: str, name: str, number: int, purpose: str, public: bytes) -> bytes:
        """Return what the silo ``name`` signs; ``public`` is its key in the run."""
        said = [self.trained_as, self.made, self.samples, self.length, self.reach, self.block]
        return _SIGNED + json.dumps([run, name, number, purpose, *said]).encode() + public

    def encode(self) -> str:
        """Return the statement as text."""
        return json.dumps(
            [
                *(self.trained_as, self.made, self.samples, self.length, self.reach),
                *(self.block, self.signature),
            ]
        )


def decode_statement(text: object) -> Statement:
    """Return the statement from the text of ``Statement.encode``.

    Raises:
        WireError: it is something else.
    """
    try:
        if not isinstance(text, str) or len(text) > MOST_CHARACTERS:
            raise ValueError(f"expected a text of at most {MOST_CHARACTERS:,} characters")
        trained_as, made, samples, length, reach, block, signature = json.loads(text)
        if not (_DIGEST.fullmatch(trained_as) and _MARK.fullmatch(made)):
            raise ValueError("its digests are not hexadecimal")
        if type(samples) is not int or not 0 < samples <= 10**15:
            raise ValueError("samples must be a whole number above 0")
        if not all(type(n) is float and 0 <= n < math.inf for n in (length, reach)):
            raise ValueError("lengths must be numbers of at least 0")
        bytes.fromhex(signature)
        return Statement(trained_as, made, samples, length, reach, read_block(block), signature)
    except Exception as error:  # text from elsewhere: of any kind
        raise WireError(f"a silo's statement of its training cannot be read: {error}") from None


def read_statement(array: NDArray[Any], samples: float, *, most: float) -> Statement:
    """Return the statement in a silo's reply.

    Args:
        samples: that the silo states besides.
        most: the longest length.

    Raises:
        WireError: it is something else, or states other samples or too long an update.
    """
    stated = decode_statement(array.tobytes().decode("ascii", errors="replace"))
    if stated.samples != samples or max(stated.length, stated.reach) > most:
        raise WireError(
            f"its statement has {stated.samples} samples and updates of length {stated.length:g} "
            f"and {stated.reach:g}. Expected {samples:g} samples, and lengths of at most {most:g}."
        )
    return stated


def read_block(rows: Sequence[Sequence[object]]) -> Block:
    """Return a block from JSON.

    Raises:
        ValueError: silos are out of order or have invalid names, or counts are not above 0.
    """
    found = tuple((str(name), float(count)) for name, count in rows)  # type: ignore[arg-type]
    names = [name for name, _ in found]
    sound = all(0 < count < math.inf for _, count in found) and all(map(is_silo_name, names))
    if not sound or names != sorted(set(names)) or len(found) > MOST_SILOS:
        raise ValueError("a block needs its silos in order, each once, and counts above 0")
    return found


def proportional(one: Block, other: Block) -> bool:
    """Return whether two blocks have the same silos, which count in the same proportions."""
    if [name for name, _ in one] != [name for name, _ in other]:
        return False
    pairs = [(a, b) for (_, a), (_, b) in zip(one, other, strict=True)]
    first, second = pairs[0]
    return all(math.isclose(a * second, b * first, rel_tol=1e-9) for a, b in pairs)


def rounded_up(value: float) -> float:
    """Return a number of at least 0 in three significant digits, never below the number."""
    if not 0 < value < math.inf:
        return max(value, 0.0)
    exponent = math.floor(math.log10(value)) - 2
    digits = math.ceil(value / 10.0**exponent)
    found = float(f"{digits}e{exponent}")
    return found if found >= value else float(f"{digits + 1}e{exponent}")
