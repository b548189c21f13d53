"""Churn of a simulation: which silos join and leave, and when."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Churn:
    """A script of joins and leaves, which makes a simulation of churn repeatable.

    Attributes:
        joins: silo → the round in which it joins; the run waits for it.
        leaves: silo → the round before which it leaves; the run waits for that.
    """

    joins: Mapping[str, int] = field(default_factory=dict)
    leaves: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Churn:
        """Read ``"late+7, north-3-14"``: *late* joins at round 7, *north-3* leaves before 14.

        Raises:
            ValueError: the text does not follow that form.
        """
        joins: dict[str, int] = {}
        leaves: dict[str, int] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            match = re.fullmatch(r"(.+)([+-])(\d+)", part)
            if match is None:
                raise ValueError(
                    f"churn must be a list of NAME+ROUND (joins) and NAME-ROUND (leaves). "
                    f"Got {part!r}."
                )
            name, sign, number = match.groups()
            (joins if sign == "+" else leaves)[name] = int(number)
        return cls(joins, leaves)
