"""The model that stands in when none is named.

Would catch: a stack trace, or a download, where the package is absent.
"""

from __future__ import annotations

import importlib.util

import pytest

from finback.base.runtime import ConfigError
from finback.io.default import DEFAULT, default_model


def test_the_default_is_a_checkpoint_folder():
    """A package built without its data."""
    folder = default_model()
    assert folder.name == DEFAULT
    assert {"config.json", "tokenizer.json"} <= {p.name for p in folder.iterdir()}


def test_an_absent_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    """The first thing that somebody sees who installed finback alone."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install ./weights"):
        default_model()


def test_an_unknown_name_gets_a_hint():
    with pytest.raises(ConfigError, match=f"did you mean '?{DEFAULT}"):
        default_model("v41-mimi")
