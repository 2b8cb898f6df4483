"""The model that is used when none is named: one of the package `finback-mini`, which is installed beside finback."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from finback.base.runtime import ConfigError, nearest

DEFAULT = "v41-mini"


def default_model(name: str = DEFAULT) -> Path:
    """The folder of a model of `finback-mini`. ConfigError if that package is not installed or lacks the model."""
    if importlib.util.find_spec("finback_mini") is None:
        raise ConfigError(
            "no model was named, and the package finback-mini with the default one is not installed. Name a checkpoint "
            "folder, or install the package: in a checkout of finback, pip install ./weights"
        )
    import finback_mini  # pyrefly: ignore[missing-import]  (another distribution, often absent)

    known = finback_mini.names()
    if name not in known:
        raise ConfigError(f"finback-mini has no model {name!r}{nearest(name, known)}; it has {', '.join(known)}")
    return Path(finback_mini.path(name))
