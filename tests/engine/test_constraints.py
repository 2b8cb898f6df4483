"""Outputs that keep a form, with drafts and without, on a real byte-level tokenizer.

Would catch: a mask of the wrong position inside a block, a matcher that stays ahead after refused drafts, an end of
sequence in the middle of a value, a control token inside a string, a bad schema that fails in the middle of a step.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from finback.base.runtime import RequestError
from finback.engine.constraints import Grammars
from finback.engine.request import SamplingParams
from finback.engine.verify import Drafted, Picker, Pickers
from finback.io.text import Tokenizer
from finback.tools.tiny_tokenizer import byte_level_tokenizer

pytest.importorskip("llguidance")

TOKENIZER = Tokenizer(byte_level_tokenizer(), bos_id=0, eos_ids=(1,), pad_id=2)
V = 520  # a few rows more than the tokenizer has, as padded embeddings have
GRAMMARS = Grammars(TOKENIZER, V)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "legs": {"enum": [2, 4, 6]},
        "tame": {"type": "boolean"},
    },
    "required": ["name", "legs", "tame"],
    "additionalProperties": False,
}
FORMS: dict[str, dict[str, Any]] = {
    "schema": {"json_schema": SCHEMA}, "schema as text": {"json_schema": json.dumps(SCHEMA)},
    "regex": {"regex": r"[a-f]{3}-[0-9]{2,4}(é|漢)!"},
    "grammar": {"grammar": 'start: "a" ("," WORD)+ ";"\nWORD: /[xyz]{2}/'},
}  # fmt: skip


def right_form(name: str, text: str) -> bool:
    if name.startswith("schema"):
        value = json.loads(text)
        return sorted(value) == ["legs", "name", "tame"] and value["legs"] in (2, 4, 6) and len(value["name"]) <= 4
    return bool(re.fullmatch(FORMS["regex"]["regex"] if name == "regex" else "a(,[xyz]{2})+;", text))


def logits_after(history: list[int]) -> Tensor:
    """Random logits [V] that prefer printable pieces to blanks, so that outputs end."""
    seed = 0
    for token in history[-4:]:
        seed = (seed * 1009 + token + 1) % 2**40
    line = torch.randn(V, generator=torch.Generator().manual_seed(seed))
    line[BLANKS] -= 20
    return line


BLANKS = [
    i for i in range(TOKENIZER.vocab_size) if i not in TOKENIZER.added_ids and not TOKENIZER.token_bytes(i).strip()
]


def generate(picker: Picker, plain: list[int] | None = None, right: int = 0, wrong: int = 0) -> list[int]:
    """Tokens up to the end of sequence; each step with `right` good drafts of `plain` and `wrong` random ones after."""
    tokens: list[int] = []
    while not tokens or tokens[-1] != 1:
        good = plain[len(tokens) : len(tokens) + right] if plain is not None else []
        drafts = good + torch.randint(V, (wrong,), generator=torch.Generator().manual_seed(len(tokens))).tolist()
        rows = [logits_after(tokens + drafts[:i]) for i in range(len(drafts) + 1)]
        tokens += picker.verify(torch.stack(rows), Drafted(drafts)).tokens
        assert len(tokens) < 400
    return tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", FORMS)
def test_outputs_have_the_form_with_any_drafts(name: str, temperature: float):
    """Random logits, so only the mask gives the form. Good drafts up to and past the end, and wrong ones after them,
    leave the tokens as they are without."""
    pickers = Pickers(TOKENIZER, V)
    for seed in range(3):
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=400, **FORMS[name])
        plain = generate(pickers.make(params, [0]))
        assert right_form(name, TOKENIZER.decode(plain[:-1]))
        for right, wrong in ((3, 0), (0, 3), (2, 2)):
            assert generate(pickers.make(params, [0]), plain, right, wrong) == plain


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_rejection_rules_keep_the_form(rule: str):
    """Their blocks move forward over drafts that are then refused, or that cannot be accepted at all."""
    for seed in range(4):
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=400, **FORMS["schema"])
        pickers = Pickers(TOKENIZER, V, rule)
        plain = generate(pickers.make(params, [0]))
        tokens = generate(pickers.make(params, [0]), plain, 3, 2)
        assert right_form("schema", TOKENIZER.decode(tokens[:-1]))


def test_the_end_is_allowed_exactly_where_the_output_is_complete():
    constraint = GRAMMARS.make(SamplingParams(regex="[0-9]{2,4}"))
    assert constraint is not None
    complete = []
    for token in [None, *TOKENIZER.encode("7"), *TOKENIZER.encode("1"), *TOKENIZER.encode("9"), *TOKENIZER.encode("5")]:
        if token is not None:
            constraint.push(token)
        allowed = constraint.allowed()
        complete.append((bool(allowed[1]), constraint.complete))
        assert not bool(allowed[TOKENIZER.vocab_size :].any())  # padded rows have no token
    assert complete == [(False, False), (False, False), (True, True), (True, True), (True, True)]
    assert constraint.allowed().nonzero().flatten().tolist() == [1]  # four digits: only the end is left
    for _ in range(3):
        constraint.pop(0)
    assert not bool(constraint.allowed()[1])
    with pytest.raises(RequestError, match="regex stopped working"):
        constraint.push(TOKENIZER.encode("x")[0])


def test_control_tokens_are_no_text():
    """ "<think>" may be spelled in a JSON string, but the control token of that spelling may not stand there."""
    constraint = GRAMMARS.make(SamplingParams(json_schema={"type": "string"}))
    assert constraint is not None
    for token in TOKENIZER.encode('"ab'):
        constraint.push(token)
    allowed = constraint.allowed()
    assert not bool(allowed[sorted(TOKENIZER.added_ids)].any())
    assert bool(allowed[TOKENIZER.encode("<think>")[0]])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"json_schema": {"type": "objekt"}}, "json_schema cannot be used: Invalid type: objekt"),
        ({"json_schema": {"$ref": "#/nowhere"}}, "nowhere"), ({"json_schema": "{nope"}, "json_schema cannot be used"),
        ({"json_schema": {"type": "string", "pattern": "("}}, "unclosed group"),
        ({"regex": "(ab"}, "regex cannot be used"), ({"grammar": "start: foo"}, 'unknown name: "foo"'),
    ],
)  # fmt: skip
def test_bad_forms_are_refused_at_once(settings: dict[str, Any], message: str):
    """Before the request runs, with the library's reason, on one line."""
    with pytest.raises(RequestError) as error:
        GRAMMARS.make(SamplingParams(**settings))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch):
    """No tokenizer, no end of sequence, no library."""
    params = SamplingParams(regex="a")
    assert GRAMMARS.make(SamplingParams()) is None
    for tokenizer in (None, Tokenizer(byte_level_tokenizer())):
        with pytest.raises(RequestError, match="regex needs a byte-level tokenizer with an end-of-sequence token"):
            Grammars(tokenizer, V).make(params)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"finback\[structured\]"):
        Grammars(TOKENIZER, V).make(params)


def test_min_tokens_against_a_complete_form():
    """Nothing may follow a complete output, so this must be an error and not a broken output."""
    picker = Pickers(TOKENIZER, V).make(SamplingParams(regex="ab", min_tokens=30), [0])
    with pytest.raises(RequestError, match="no token is allowed at position"):
        generate(picker)
