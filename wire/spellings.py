"""Other names of strategies, and of metrics and settings in other apps, and ours for them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from coterie.wire import names

ACCURACY: Final = "accuracy"
"""Reported by some ClientApps in place of an error, which is 1 − accuracy."""

METRIC_SPELLINGS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        names.NUM_EXAMPLES: ("num-samples",),
        names.TRAIN_LOSS: ("training-loss", "train-logloss"),
        names.LOSS: (
            *("eval-loss", "evaluation-loss", "test-loss", "test-logloss"),
            *("val-loss", "valid-loss"),
        ),
        names.ERROR: ("eval-error", "test-error", "val-error"),
        ACCURACY: (
            *("acc", "eval-acc", "eval-accuracy", "test-acc", "test-accuracy"),
            *("val-acc", "val-accuracy"),
        ),
    }
)
"""Our name → its other spellings; the first that a reply has counts."""

SETTING_SPELLINGS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        names.LOCAL_EPOCHS: ("epochs", "num-epochs", "num-local-epochs"),
        names.ROUNDS: ("num-server-rounds", "num-rounds"),
    }
)
"""Our name → other spellings, for a coordinator's settings."""

LOCAL: Final = "local"
"""The field's word for what the strategy ``independent`` does: local training."""


def strategy_of(name: Any) -> Any:
    """Return our name of a strategy: ``local`` is ``independent``."""
    return "independent" if name == LOCAL else name


_OURS = {
    other: name
    for spellings in (METRIC_SPELLINGS, SETTING_SPELLINGS)
    for name, others in spellings.items()
    for other in others
}


def spelled(key: str) -> str:
    """Return our name for a metric or setting of any app: ``eval_acc`` is ``accuracy``.

    An unknown name is only converted to dashes and lower case.
    """
    dashed = key.lower().replace("_", "-")
    return _OURS.get(dashed, dashed)


def understood(metrics: Mapping[str, float], own: Mapping[str, str]) -> dict[str, float]:
    """Return a reply's metrics, with those of other spellings under our names too.

    Args:
        metrics: as the app states them; a metric with our name keeps its value.
        own: the app's name → ours; it takes precedence over the usual spellings.
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
