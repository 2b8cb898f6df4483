"""Recipes: what they refuse, and that those of the repository are sound."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from finback.base.runtime import ConfigError
from finback.train.estimate import estimate
from finback.train.recipe import override, read_recipe
from finback.train.records import KINDS

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))
DEMO = next(path for path in RECIPES if path.name == "v41-1m.toml")


@pytest.mark.parametrize(
    ("change", "answer"),
    [
        ("run.stepz=3", "did you mean 'steps'"),
        ("optim.matrix_lr.x=3", "below a plain value"),
        ("model.text_config.hidden_sise=3", "did you mean 'hidden_size'"),
        ("run.steps='many'", "not of type int"),
        ("run.steps=0", "at least 1"),
        ("data.sources.txt.share=2", "did you mean 'text'"),
        ("data.sources.text.sharee=2", "did you mean 'share'"),
        ("run.steps", "section.key=value"),
        ("run.dtype=float16", "float32. or .bfloat16"),
        ("model.model_type=deepseek_v4", "did you mean 'deepseek_v41'"),
        ("stages=[{until=0.5}]", "ascending"),
        ("tokenizer.path=x", "give one of them"),
    ],
)
def test_mistakes_are_named(change: str, answer: str):
    """An ignored key is a run of hours with the wrong setting."""
    with pytest.raises(ConfigError, match=answer):
        estimate(read_recipe(DEMO, [change]))


def test_overrides_reach_their_place():
    recipe = read_recipe(DEMO, ["data.sources.text.path=a b.jsonl", "optim.lr=1", "model.text_config.hc_mult=2"])
    assert recipe.data.sources[0].path == str(DEMO.parent / "a b.jsonl")
    assert recipe.optim.lr == 1.0 and recipe.model["text_config"]["hc_mult"] == 2


def test_stages_follow_each_other():
    """The last step belongs to the last stage, the first to the first, and a border to what comes after it."""
    recipe = read_recipe(DEMO, ["run.steps=10", "stages=[{until=0.3, select=false}, {until=1.0, shares=['text=4']}]"])
    assert [recipe.stage_at(s).select for s in range(10)] == [False] * 3 + [True] * 7
    assert recipe.shares(recipe.stages[0]) == [1.0] and recipe.shares(recipe.stages[1]) == [4.0]


def test_the_guide_names_keys_that_exist():
    """A key that was renamed stays in the guide, and is refused when somebody copies it."""
    guide = (DEMO.parents[1] / "docs" / "training.md").read_text(encoding="utf-8")
    found = re.findall(r"\b(run|data|loss|optim|tokenizer|quant)\.(\w+)", guide.replace("data.sources.", ""))
    found = [(section, key) for section, key in found if key not in ("py", "json")]
    assert len(found) > 5
    for section, key in found:
        override({}, f"{section}.{key}=1")
    assert all(f"| `{kind}` |" in guide for kind in KINDS)
    assert all(f"`{path.stem}`" in guide for path in RECIPES)


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_recipes_of_the_repository_are_sound(path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each builds, and has about as many parameters as its name says."""
    monkeypatch.setattr("finback.train.estimate._measure", lambda device, dtype: None)
    recipe = read_recipe(path)
    assert "unknown" in estimate(recipe).text()
    assert recipe.name == path.stem
    found = estimate(recipe)
    size = int(re.findall(r"-(\d+)m", path.stem)[0])
    backbone = sum(count for role, count in found.parameters.items() if role != "draft")
    assert 0.6 * size < backbone / 1e6 < 1.9 * size
    assert found.total_flops > 1e12 and found.active <= sum(found.parameters.values()) * 1.2
