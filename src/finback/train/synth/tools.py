"""Requests with tools on offer: the right call, no call where none fits, and what to say to a result."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from finback.io.conversation import ChatOptions, Message, Tool
from finback.train.synth import words as w
from finback.train.synth.sample import Draw, Sample, answered, called, said

_TOWNS = (
    "Berlin Paris Rome Oslo Madrid Vienna Lisbon Athens Dublin Prague Tokyo Cairo Lima Quito Boston Denver Chicago "
    "Sydney Delhi Seoul"
).split()
_LANGUAGES = "French German Spanish Italian Dutch Latin Greek Polish".split()
_ROOMS = "kitchen bedroom hall bathroom attic cellar garage office".split()
_UNITS = (("miles", "kilometers"), ("pounds", "kilograms"), ("inches", "centimeters"), ("cups", "liters"))


@dataclass(frozen=True)
class Kind:
    """A tool. names: it may go by. parameters: name -> (type, a value). requests: filled with the values. result: of a
    call. reply: filled with values and result."""

    names: tuple[str, ...]
    description: str
    parameters: dict[str, tuple[str, Callable[[Draw], Any]]]
    requests: tuple[str, ...]
    result: Callable[[Draw], dict[str, Any]]
    reply: str


_KINDS = (
    Kind(
        ("get_weather", "weather", "weather_report"), "The weather of a city on a day.",
        {"city": ("string", lambda d: d.one(_TOWNS)), "day": ("string", lambda d: d.one(w.DAYS))},
        ("What is the weather in {city} on {day}?", "How will it be on {day} in {city}?",
         "I travel to {city} on {day}. Do I need a coat?"),
        lambda d: {"weather": d.one(w.WEATHER), "degrees": d.number(0, 35)},
        "In {city} it will be {weather} on {day}, with {degrees} degrees.",
    ),
    Kind(
        ("set_timer", "start_timer", "timer"), "Start a timer.",
        {"minutes": ("integer", lambda d: d.number(1, 90)), "label": ("string", lambda d: d.one(w.GOODS))},
        ("Set a timer for {minutes} minutes for the {label}.", "Remind me of the {label} in {minutes} minutes.",
         "The {label} must cook for {minutes} minutes. Please time it."),
        lambda d: {"ok": True, "timer": d.number(1, 9)},
        "Timer {timer} for the {label} is set to {minutes} minutes.",
    ),
    Kind(
        ("send_message", "message", "send_text"), "Send a short message to a person.",
        {"to": ("string", lambda d: d.one(w.NAMES)),
         "text": ("string", lambda d: f"Meet me at {d.one(w.PLACES)} on {d.one(w.DAYS)}.")},
        ('Write to {to}: "{text}"', 'Send {to} this message: "{text}"', 'Tell {to} the following: "{text}"'),
        lambda d: {"sent": True},
        "Your message to {to} is sent.",
    ),
    Kind(
        ("set_light", "light", "switch_light"), "Set the light of a room to a level from 0 to 100.",
        {"room": ("string", lambda d: d.one(_ROOMS)), "level": ("integer", lambda d: d.number(0, 100))},
        ("Set the light in the {room} to {level}.", "I want the {room} light at {level} percent.",
         "Light in the {room}: {level} please."),
        lambda d: {"ok": True},
        "The light in the {room} is now at {level}.",
    ),
    Kind(
        ("translate", "translate_word", "dictionary"), "Translate a word into another language.",
        {"word": ("string", lambda d: d.one(w.OBJECTS)), "language": ("string", lambda d: d.one(_LANGUAGES))},
        ('What is "{word}" in {language}?', "How do you say {word} in {language}?",
         "Translate {word} into {language}."),
        lambda d: {"translation": "".join(d.some("aeiolmnrstv", 5))},
        '"{word}" in {language} is "{translation}".',
    ),
    Kind(
        ("convert", "convert_units", "unit_converter"), "Convert a value from one unit into another.",
        {"value": ("integer", lambda d: d.number(2, 500)), "unit": ("string", lambda d: d.one(_UNITS)[0]),
         "to": ("string", lambda d: d.one(_UNITS)[1])},
        ("Convert {value} {unit} to {to}.", "How many {to} are {value} {unit}?", "{value} {unit} in {to}?"),
        lambda d: {"result": d.number(1, 900)},
        "{value} {unit} are {result} {to}.",
    ),
    Kind(
        ("book_table", "reserve_table", "reservation"), "Book a table at a restaurant.",
        {"name": ("string", lambda d: d.one(w.NAMES)), "guests": ("integer", lambda d: d.number(2, 12)),
         "day": ("string", lambda d: d.one(w.DAYS))},
        ("Book a table for {guests} on {day}, in the name of {name}.",
         "{name} wants a table on {day} for {guests} people.", "A table for {guests}, {day}, for {name} please."),
        lambda d: {"ok": True, "table": d.number(1, 40)},
        "Table {table} is booked for {name} on {day}.",
    ),
    Kind(
        ("get_price", "price", "shop_price"), "The price of an article in the shop.",
        {"article": ("string", lambda d: f"{d.one(w.COLORS)} {d.one(w.OBJECTS)}")},
        ("What does a {article} cost?", "How much is a {article}?", "I want to buy a {article}. What is the price?"),
        lambda d: {"coins": d.number(2, 99)},
        "A {article} costs {coins} coins.",
    ),
    Kind(
        ("find_train", "train", "next_train"), "The next train between two cities.",
        {"start": ("string", lambda d: d.one(_TOWNS[:10])), "goal": ("string", lambda d: d.one(_TOWNS[10:]))},
        ("When is the next train from {start} to {goal}?", "I am in {start} and must go to {goal}.",
         "Find a train to {goal}. I start in {start}."),
        lambda d: {"time": f"{d.number(6, 22)}:{d.number(10, 59)}", "track": d.number(1, 20)},
        "The next train from {start} to {goal} leaves at {time} on track {track}.",
    ),
    Kind(
        ("play_song", "play", "music"), "Play a song.",
        {"title": ("string", lambda d: d.one(w.SONGS).strip('"')), "times": ("integer", lambda d: d.number(2, 60)),
         "loud": ("boolean", lambda d: d.chance(0.5))},
        ('Play "{title}" {times} times{how}.', 'I would like to hear "{title}" {times} times{how}.',
         'Put on "{title}", {times} times{how}.'),
        lambda d: {"playing": True},
        'Now playing "{title}".',
    ),
    Kind(
        ("look_up", "search", "encyclopedia"), "Look something up in the encyclopedia.",
        {"query": ("string", lambda d: f"{d.one(w.ANIMALS)} {d.one(('food', 'age', 'size', 'home'))}")},
        ('Look up "{query}" for me.', 'What does the encyclopedia say to "{query}"?', 'Search for "{query}".'),
        lambda d: {"page": d.number(1, 900)},
        'There is something about "{query}" on page {page}.',
    ),
    Kind(
        ("add_item", "shopping_list", "add_to_list"), "Put goods on the shopping list.",
        {"item": ("string", lambda d: d.one(w.GOODS)), "count": ("integer", lambda d: d.number(2, 40))},
        ("Put {count} {item} on the shopping list.", "We need {count} {item}.", "Add {count} {item} to my list."),
        lambda d: {"entries": d.number(2, 30)},
        "I have added {count} {item}. The list now has {entries} entries.",
    ),
)  # fmt: skip
_SMALL_TALK = (
    ("Hello!", "Hello! What can I do for you?"),
    ("Thank you very much.", "You are welcome."),
    ("Good morning.", "Good morning! How can I help?"),
    ("Good night!", "Good night! Sleep well."),
    ("Who are you?", "I am a small language model."),
    ("How are you?", "I am fine, thank you. How can I help?"),
)


def tool_call(draw: Draw) -> Sample:
    """One or two tools; the request fits one of them, or none. In a third, the tool's result is there already and is
    put into words."""
    kind, other = draw.some(_KINDS, 2)
    name = draw.one(kind.names)
    tools = [_tool(kind, name)]
    if draw.chance(0.5):
        tools.append(_tool(other, draw.one(other.names)))
        draw.random.shuffle(tools)
    thinking = draw.chance(0.5)
    if draw.chance(0.12):
        asked, reply = draw.one(_SMALL_TALK)
        return _sample(
            "tool_none", (said("user", asked), answered(reply, "No tool is needed." * thinking)), tools, thinking
        )
    values = draw.allowed(
        lambda: {k: make(draw) for k, (_, make) in kind.parameters.items()}, lambda v: sorted(v.items())
    )
    if kind.names[0] == "play_song":
        shown = {**values, "how": ", nice and loud" if values["loud"] else ", but not loud"}
    else:
        shown = values
    request = said("user", draw.one(kind.requests).format_map(shown))
    call = called(name, values, f"I need {name}." * thinking)
    if draw.chance(0.65):
        return _sample("tool_call", (request, call), tools, thinking)
    result = kind.result(draw)
    returned = Message("tool", (json.dumps(result),), call_id="call_0")
    reply = answered(kind.reply.format_map({**values, **result}), "The result is there." * thinking)
    return _sample("tool_result", (request, call, returned, reply), tools, thinking)


def _sample(kind: str, messages: tuple[Message, ...], tools: list[Tool], thinking: bool) -> Sample:
    return Sample(kind, messages=messages, tools=tuple(tools), options=ChatOptions(thinking=thinking))


def _tool(kind: Kind, name: str) -> Tool:
    properties = {key: {"type": type_} for key, (type_, _) in kind.parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return Tool(name, kind.description, schema)
