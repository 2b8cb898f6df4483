"""finback: run and check the DeepSeek sparse family. The public names are loaded when first used, so that
`import finback` is quick and touches neither torch nor a device."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finback.engine.llm import LLM
    from finback.engine.request import SamplingParams
    from finback.io.load import load_model

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__", "load_model"]

_HOME = {
    "LLM": "finback.engine.llm",
    "SamplingParams": "finback.engine.request",
    "load_model": "finback.io.load",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'finback' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
