"""What metrics and settings are called in other people's Flower apps, and here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from coterie.wire import names

ACCURACY: Final = "accuracy"
"""Of ClientApps that state it in place of an error, which is 1 less this."""

METRIC_SPELLINGS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        names.NUM_EXAMPLES: ("num-samples",),
        names.TRAIN_LOSS: ("training-loss",),
        names.LOSS: ("eval-loss", "evaluation-loss", "test-loss", "val-loss", "valid-loss"),
        names.ERROR: ("eval-error", "test-error", "val-error"),
        ACCURACY: (
            *("acc", "eval-acc", "eval-accuracy", "test-acc", "test-accuracy"),
            *("val-acc", "val-accuracy"),
        ),
    }
)
"""Name here → what else it is called; the first that a reply has counts."""

SETTING_SPELLINGS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        names.LOCAL_EPOCHS: ("epochs", "num-epochs", "num-local-epochs"),
        names.ROUNDS: ("num-server-rounds", "num-rounds"),
    }
)
"""The same of what a server asks for."""

_OURS = {
    other: name
    for spellings in (METRIC_SPELLINGS, SETTING_SPELLINGS)
    for name, others in spellings.items()
    for other in others
}


def spelled(key: str) -> str:
    """What a metric or setting of any app is called here: ``eval_acc`` is ``accuracy``.

    With dashes and in small letters, which is all that happens to a name that is not known.
    """
    dashed = key.lower().replace("_", "-")
    return _OURS.get(dashed, dashed)


def understood(metrics: Mapping[str, float], own: Mapping[str, str]) -> dict[str, float]:
    """The metrics of a reply, those that are called otherwise elsewhere under our names too.

    Args:
        metrics: as the app states them; what has our name already stays what it is.
        own: the app's name → ours, before all usual spellings.
    """
    found = {**metrics, **{own[key]: value for key, value in metrics.items() if key in own}}
    dashed = {k.lower().replace("_", "-"): v for k, v in metrics.items() if k not in own}
    for name, others in METRIC_SPELLINGS.items():
        for spelling in (name, *others):
            if spelling in dashed:
                found.setdefault(name, dashed[spelling])
    accuracy = found.get(ACCURACY, float("nan"))
    if 0 <= accuracy <= 1:
        found.setdefault(names.ERROR, 1.0 - accuracy)
    return found
