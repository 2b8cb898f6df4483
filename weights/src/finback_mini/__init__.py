"""Where the small trained models of finback lie. Nothing else is in this package, and it imports nothing heavy."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent


def names() -> list[str]:
    """The models of this package, sorted."""
    return sorted(p.name for p in _FOLDER.iterdir() if (p / "config.json").is_file())


def path(name: str = "v41-mini") -> Path:
    """The folder of a model, in its released layout. Raises KeyError for a name that is not in `names()`."""
    if name not in names():
        raise KeyError(f"finback-mini has no model {name!r}; it has {', '.join(names())}")
    return _FOLDER / name
