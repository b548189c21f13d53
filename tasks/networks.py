"""Networks of coterie, torchvision or timm by name; their weights, and what is frozen.

Nothing is downloaded: a network is made without weights, which come from a file. Every silo has the
same file, and its SHA-256 is part of what silos must have in common.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import nn

from coterie.tasks.base import TaskError
from coterie.tasks.models import GROUP_NORM, NETWORKS, named, of_head, with_group_norm

ALL_BUT_HEAD = "all-but-head"
INCEPTIONS = ("googlenet", "inception_v3")
"""torchvision networks with auxiliary heads for training, which are left out."""
COUNTER = "num_batches_tracked"
"""BatchNorm's counter, used only without momentum and absent from old files."""


OF_EVERY_SHAPE = ("mclr", "mlp")
"""Name prefixes of networks that also accept rows of a table."""


def make(name: str, *, shape: tuple[int, ...], num_classes: int) -> tuple[nn.Module, str]:
    """Return a freshly initialised network, and the prefix of its head's array names.

    The head is the last layer, from features to logits.

    Args:
        name: one of ``NETWORKS``, ``torchvision/NAME`` or ``timm/NAME``; the suffix ``+groupnorm``
            replaces BatchNorm by GroupNorm.
        shape: of one sample.
        num_classes: number of logits.

    Raises:
        TaskError: the network is unknown, or does not accept such samples.
    """
    library, _, called = name.partition("/")
    if not called or library not in _MAKERS:
        return _own(name, shape, num_classes), "head."
    model = _MAKERS[library](called.removesuffix(GROUP_NORM), shape, num_classes)
    if called.endswith(GROUP_NORM):
        with_group_norm(model)
    return model, _head_of(name, model, shape, num_classes)


def _own(name: str, shape: tuple[int, ...], num_classes: int) -> nn.Module:
    if name.removesuffix(GROUP_NORM) not in NETWORKS:
        known = ", ".join(NETWORKS) + ", or torchvision/NAME or timm/NAME"
        if len(shape) == 1:
            known = ", ".join(n for n in NETWORKS if n.startswith(OF_EVERY_SHAPE))
            known += ", trees or any"
        raise TaskError(f"network must be one of {known}. Got {name!r}.")
    try:
        return named(name, shape=shape, num_classes=num_classes)
    except (ValueError, TypeError, RuntimeError, ZeroDivisionError):
        raise TaskError(
            f"network {name!r} cannot be made for samples of shape {shape}. mclr and the mlp "
            "networks accept every shape."
        ) from None


def _of_torchvision(name: str, shape: tuple[int, ...], num_classes: int) -> nn.Module:
    from torchvision import models

    _must_be_known("torchvision", name, models.list_models(module=models))
    more: dict[str, Any] = {}
    if name in INCEPTIONS:
        more = {"aux_logits": False, "init_weights": True}
    elif name.startswith("vit_"):
        more = {"image_size": shape[-1]}
    return _made(f"torchvision/{name}", shape, models.get_model, name, num_classes, **more)


def _of_timm(name: str, shape: tuple[int, ...], num_classes: int) -> nn.Module:
    try:
        import timm
    except ImportError:
        raise TaskError(
            f"network 'timm/{name}' needs timm, which is not installed here: "
            "pip install 'coterie[networks]'."
        ) from None
    # Only names that timm has itself: of hf-hub: and the like it would ask a server.
    _must_be_known("timm", name, timm.list_models())
    more: dict[str, Any] = {"in_chans": shape[0]}
    known = timm.get_pretrained_cfg(name)
    if known is not None and known.fixed_input_size:
        more["img_size"] = tuple(shape[1:])
    return _made(f"timm/{name}", shape, timm.create_model, name, num_classes, **more)


class Logits(nn.Module):
    """A transformers model for a training loop: inputs by name, only logits as output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return logits (batch, …) of the model called with the nest's entries."""
        logits: torch.Tensor = self.model(**x).logits
        return logits


_MAKERS: dict[str, Callable[[str, tuple[int, ...], int], nn.Module]] = {
    "torchvision": _of_torchvision,
    "timm": _of_timm,
}


def _must_be_known(library: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        near = ", ".join(get_close_matches(name, known)) or ", ".join(known[:3]) + ", …"
        raise TaskError(f"{library} has no image classification network {name!r}. It has {near}.")


def _made(
    name: str,
    shape: tuple[int, ...],
    make: Callable[..., nn.Module],
    called: str,
    num_classes: int,
    **more: Any,
) -> nn.Module:
    if len(shape) != 3:
        raise _unfit(name, shape, "it needs images: channels, height, width")
    try:
        return make(called, num_classes=num_classes, **more)
    except Exception as error:  # of libraries that are not ours
        raise _unfit(name, shape, str(error)) from None


def _unfit(name: str, shape: tuple[int, ...], why: str) -> TaskError:
    grey = " torchvision networks need colour images: give shape three channels." * (
        name.startswith("torchvision/") and shape[:1] != (3,)
    )
    return TaskError(
        f"network {name!r} cannot be made for samples of shape {shape}: {why.strip()[:300]}.{grey}"
    )


def _head_of(name: str, model: nn.Module, shape: tuple[int, ...], num_classes: int) -> str:
    """Return the prefix of the last layer, after checking the model's output in a trial."""
    layers = [
        (where, module)
        for where, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d) and module.weight.shape[0] == num_classes
    ]
    if not layers:
        raise _unfit(name, shape, f"it has no last layer with {num_classes} classes")
    prefix, head = layers[-1]
    answered: list[torch.Tensor] = []
    hook = head.register_forward_hook(lambda _, inputs, output: answered.append(output))
    try:
        with torch.no_grad():
            logits = model.eval()(torch.zeros(1, *shape))
    except Exception as error:  # of libraries that are not ours
        raise _unfit(name, shape, str(error)) from None
    finally:
        hook.remove()
        model.train()
    if not isinstance(logits, torch.Tensor) or logits.shape != (1, num_classes):
        raise _unfit(name, shape, "it does not give one logit for each class")
    if isinstance(head, nn.Linear) and not torch.equal(answered[-1], logits):
        raise _unfit(name, shape, f"its output is not only that of its last layer, {prefix}")
    return f"{prefix}."


def load_file(
    model: nn.Module, file: Path, *, head: str = "", expected: str = ""
) -> tuple[str, str]:
    """Copy a safetensors file's arrays into the model; return the file's name and its SHA-256.

    Args:
        file: must have all arrays of the model by name, except perhaps those of the head.
        head: prefix of the head's names. If the file's head is missing or has other classes, the
            model's own stays. Empty: the file must have all arrays.
        expected: required SHA-256; empty: any.

    Raises:
        TaskError: the file is missing, is a different one, or does not fit.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        content = file.read_bytes()
    except OSError as error:
        raise TaskError(
            f"the file of weights {str(file)!r} cannot be read: {error.strerror}. Every silo "
            "must have it at the path in the declaration."
        ) from None
    digest = hashlib.sha256(content).hexdigest()
    if expected not in ("", digest):
        raise TaskError(
            f"{file.name} has SHA-256 {digest}, but {expected} is expected. Use the file that "
            "all other silos have; sha256sum prints a file's SHA-256."
        )
    try:
        arrays = load(content)
    except SafetensorError as error:
        raise TaskError(f"{str(file)!r} is not a safetensors file: {error}.") from None
    state = model.state_dict()
    own = {
        name
        for name, tensor in state.items()
        if head and name.startswith(head) and getattr(arrays.get(name), "shape", ()) != tensor.shape
    }
    wanted = [name for name in state if name not in own and not name.endswith(COUNTER)]
    missing = [name for name in wanted if name not in arrays]
    more = [n for n in arrays if n not in state and not n.lower().startswith("aux")]
    odd = [n for n in wanted if n in arrays and arrays[n].shape != state[n].shape]
    for names, what in (
        (missing, "lacks arrays of the network"),
        (more, "has arrays that the network does not have"),
        (odd, "has arrays of other shapes than the network's"),
    ):
        if names:
            listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
            raise TaskError(f"{file.name} {what}: {listed}. Was it saved for a different network?")
    with torch.no_grad():
        for name, tensor in state.items():
            if name in arrays and name not in own:
                tensor.copy_(arrays[name])
    return file.name, digest


def freeze(model: nn.Module, what: str | Sequence[str], *, head: str) -> None:
    """Exclude parameters from training, in place.

    ``what`` is ``all-but-head``, or prefixes of parameter names; ``head`` is the prefix of the
    head's. Raises ``TaskError`` if a prefix matches no parameter, or nothing is left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    if what == ALL_BUT_HEAD:
        frozen = {name for name in names if not name.startswith(of_head(model, head))}
    else:
        for prefix in what:
            if not any(name.startswith(prefix) for name in names):
                raise TaskError(
                    f"freeze names {prefix!r}, but no parameter's name begins with it. The "
                    f"parameters are {', '.join(names[:4])}, …, {names[-1]}."
                )
        frozen = {name for name in names if name.startswith(tuple(what))}
    if len(frozen) == len(names):
        raise TaskError("freeze names all parameters: nothing would be trained.")
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad = False
