"""The device on which torch computes: chosen, tried, and set to repeat its results."""

from __future__ import annotations

import logging
import os

import torch

log = logging.getLogger("coterie")


def device_of(wanted: str) -> torch.device:
    """Return the device ``auto``, ``cpu``, ``cuda`` or ``cuda:N``, tested with a small computation.

    A GPU then gives the same bits whenever it does the same work. ``auto`` falls back to the CPU,
    with a warning if there is a GPU. Raises ValueError if a named device cannot be used.
    """
    if wanted == "auto" and not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda" if wanted == "auto" else wanted)
    if device.type == "cpu":
        return device
    why = _unusable(device)
    if not why:
        _repeat_results()
        return device
    if wanted == "auto":
        log.warning(
            "the GPU cannot be used, so the CPU is used: %s. Install a PyTorch that supports "
            'this GPU and its driver, or set device = "cpu".',
            why,
        )
        return torch.device("cpu")
    raise ValueError(f"device {wanted!r} cannot be used: {why}. Use auto or cpu.")


def seed_torch(seed: int) -> None:
    """Seed torch's random numbers on every device.

    Without an accelerator only the CPU's: until CUDA is used, ``torch.manual_seed`` notes the stack
    of every call, which takes a millisecond and more.
    """
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def _repeat_results() -> None:
    """Have CUDA add in the same order every time: convolutions otherwise differ in the last bits.

    torch warns, once for each kind, of operations that have no such form.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


def _unusable(device: torch.device) -> str:
    """Return why a device cannot add two numbers; empty if it can."""
    if not torch.cuda.is_available():
        return "PyTorch finds no CUDA device"
    count = torch.cuda.device_count()
    if device.index is not None and device.index >= count:
        return f"PyTorch finds {count} CUDA device{'s' * (count != 1)}, and cuda:0 is the first"
    try:
        (torch.zeros(1, device=device) + 1).item()
    except (RuntimeError, AssertionError) as error:  # AssertionError: a PyTorch without CUDA
        return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
    return ""
