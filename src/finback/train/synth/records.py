"""Answers that have to follow a JSON schema: a text with facts, a schema, the facts as an object."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from finback.io.conversation import ChatOptions
from finback.train.synth import words as w
from finback.train.synth.sample import Draw, Sample, answered, said


@dataclass(frozen=True)
class Field:
    """names: keys it may go by. type: of JSON. draw: a value. say: sentence with {name} and {value}."""

    names: tuple[str, ...]
    type: str
    draw: Callable[[Draw], Any]
    say: str


def _listed(values: list[str]) -> str:
    return values[0] if len(values) == 1 else f"{', '.join(values[:-1])} and {values[-1]}"


_PERSON = (
    Field(("age", "years"), "integer", lambda d: d.number(5, 90), "{name} is {value} years old."),
    Field(("home", "lives_near", "place"), "string", lambda d: d.one(w.PLACES), "{name} lives near {value}."),
    Field(("hobby", "interest"), "string", lambda d: d.one(w.HOBBIES), "{name} likes {value}."),
    Field(("color", "favorite_color"), "string", lambda d: d.one(w.COLORS), "The best color is {value}, says {name}."),
    Field(("pet", "animal"), "string", lambda d: d.one(w.ANIMALS), "{name} has a pet: it is {value}."),
    Field(("can_swim", "swims"), "boolean", lambda d: d.chance(0.5), "{name} can {not}swim."),
    Field(("day", "birthday"), "string", lambda d: d.one(w.DAYS), "This year the birthday is on a {value}."),
    Field(("things", "bag"), "array", lambda d: d.some(w.OBJECTS, d.number(1, 3)), "In the bag: {value}."),
)
_ORDER = (
    Field(("item", "goods", "product"), "string", lambda d: d.one(w.GOODS), "{name} orders {value}."),
    Field(("count", "amount", "quantity"), "integer", lambda d: d.number(1, 60), "It shall be {value} pieces."),
    Field(("price", "cost"), "integer", lambda d: d.number(2, 200), "That costs {value} coins."),
    Field(("day", "delivery"), "string", lambda d: d.one(w.DAYS), "They are brought on {value}."),
    Field(("place", "address", "to"), "string", lambda d: d.one(w.PLACES), "They go to {value}."),
    Field(("paid", "is_paid"), "boolean", lambda d: d.chance(0.5), "It is {not}paid yet."),
    Field(("extras", "also"), "array", lambda d: d.some(w.TOOLS, d.number(1, 2)), "Also wanted: {value}."),
)
_KINDS = ((_PERSON, ("name", "person", "who"), "the person"), (_ORDER, ("name", "customer", "buyer"), "the order"))


def json_answer(draw: Draw) -> Sample:
    """Two to five facts of a person or an order, wanted as an object whose keys the schema names."""
    fields, keys, what = draw.one(_KINDS)
    person = draw.allowed(lambda: (draw.one(w.NAMES), draw.one(w.PLACES)), lambda p: p[0], lambda p: p[1])[0]
    told = draw.some(fields, draw.number(2, min(5, len(fields))))
    drawn = [(f, draw.one(f.names), f.draw(draw)) for f in told]
    text = " ".join(_sentence(field, person, value) for field, _, value in drawn)
    if "{name}" not in told[0].say:
        text = f"This is about {person}. {text}"
    wanted = [(draw.one(keys), "string", person)] + [(key, f.type, v) for f, key, v in drawn if draw.chance(0.85)]
    draw.random.shuffle(wanted)
    schema = {
        "type": "object",
        "properties": {key: _type(kind) for key, kind, _ in wanted},
        "required": [key for key, _, _ in wanted],
    }
    ask = draw.one((f"Give {what} as JSON.", f"Write {what} down as a JSON object.", "As JSON, please."))
    thinking = draw.chance(0.4)
    return Sample(
        "json",
        messages=(
            said("user", f"{text}\n\n{ask}"),
            answered(json.dumps({key: value for key, _, value in wanted})),
        ),
        options=ChatOptions(thinking=thinking, response_schema=schema),
    )


def _type(kind: str) -> dict[str, Any]:
    return {"type": "array", "items": {"type": "string"}} if kind == "array" else {"type": kind}


def _sentence(field: Field, name: str, value: Any) -> str:
    shown = _listed(value) if isinstance(value, list) else value
    return field.say.format_map({"name": name, "value": shown, "not": "" if value else "not "})
