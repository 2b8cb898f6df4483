"""Errors a user can cause, logging, warn-once, seeding. Everything else may import this; it imports nothing of ours."""

from __future__ import annotations

import difflib
import logging
import os
import random
from collections.abc import Callable, Iterable
from functools import lru_cache

logger = logging.getLogger("finback")


class FinbackError(Exception):
    """Base of every error that a user can cause. Its text says what was given, what is allowed and what to do."""


class ConfigError(FinbackError, ValueError):
    """A configuration value, key or option that cannot be used."""


class CheckpointError(FinbackError, ValueError):
    """A checkpoint that is missing, incomplete, damaged or of another model."""


class RequestError(FinbackError, ValueError):
    """A request (prompt, image, sampling option) that cannot be served."""


class KernelUnavailable(FinbackError, RuntimeError):
    """A backend was asked for by name but cannot run this operation on this machine or with these arguments."""


class NonFiniteError(FinbackError, ArithmeticError):
    """The model produced NaN or infinity. The text names the first layer or tensor where it appeared."""


_warned: set[str] = set()


def warn_once(message: str) -> None:
    """Log `message` as a warning the first time it is given in this process."""
    if message not in _warned:
        _warned.add(message)
        logger.warning(message)


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for error texts: " (did you mean 'x'?)" when a known name is close to `name`, else ""."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


def release_freed_memory() -> None:
    """Give freed pages back to the system where the C library keeps them (glibc keeps freed blocks below 32 MB, holes
    between others included, and they count as resident)."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@lru_cache
def _malloc_trim() -> Callable[[int], int] | None:
    import ctypes

    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library
        return None


def rank() -> int:
    """This process's rank as set by a launcher such as torchrun, 0 without one."""
    return int(os.environ.get("RANK", "0"))


def seed_everything(seed: int) -> None:
    """Seed Python's, numpy's and torch's global generators (all devices)."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
