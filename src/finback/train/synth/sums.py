"""Sums, differences and word problems. They are worked out digit by digit from the last one on, the one order in which
every step needs only what stands before it.
"""

from __future__ import annotations

from finback.train.synth import words as w
from finback.train.synth.sample import Draw, Sample, question

_PLACES = ("ones", "tens", "hundreds", "thousands")
_THINGS = "apples shells buttons coins marbles plums books pencils eggs stamps cards stones".split()
_FORMS = (
    "What is {x} {op} {y}?",
    "{x} {op} {y} =",
    "Calculate {x} {op} {y}.",
    "How much is {x} {word} {y}?",
    "{x} {word} {y}",
)


def working(x: int, y: int, op: str) -> str:
    """The steps of x + y, or of x - y for x >= y."""
    steps, digits, carry = [], [], 0
    width = max(len(str(x)), len(str(y)))
    for i in range(width):
        p, q = x // 10**i % 10, y // 10**i % 10
        term = f"{p} {op} {q}" + (f" {op} 1" if carry else "")
        value = p + q + carry if op == "+" else p - q - carry
        carry = int(value > 9 or value < 0)
        if op == "+":
            step = f"{term} = {value}" + (f", write {value % 10}, carry 1" if carry else "")
        else:
            step = f"{term}" + (f" + 10 = {value + 10}, borrow 1" if carry else f" = {value}")
        steps.append(f"{_PLACES[i]}: {step}")
        digits.append(value % 10)
    if carry:
        steps.append(f"{_PLACES[width]}: 1")
        digits.append(1)
    result = x + y if op == "+" else x - y
    return "; ".join(steps) + f". From the end: {' '.join(map(str, digits))}. So {result}."


def _operands(draw: Draw) -> tuple[int, int, str]:
    """Two numbers of one to three digits each and a sign, all lengths alike; differences are not negative."""

    def number() -> int:
        size = draw.one((1, 2, 2, 3, 3, 3))
        return draw.number(0, 9) if size == 1 else draw.number(10 ** (size - 1), 10**size - 1)

    def make() -> tuple[int, int, str]:
        x, y, op = number(), number(), draw.one("+-")
        return (y, x, op) if op == "-" and x < y else (x, y, op)

    # Pairs of single digits are facts to know by heart: there is nothing to withhold.
    if draw.split != "withheld" and draw.chance(0.06):
        x, y = sorted((draw.number(0, 9), draw.number(0, 9)), reverse=True)
        return x, y, draw.one("+-")
    return draw.allowed(make, lambda m: m[0], lambda m: m[2], lambda m: m[1])


def sum_(draw: Draw) -> Sample:
    """A sum or difference; with thinking mostly, else with the working in the answer."""
    x, y, op = _operands(draw)
    text = draw.one(_FORMS).format(x=x, y=y, op=op, word="plus" if op == "+" else "minus")
    result = f"{x} {op} {y} = {x + y if op == '+' else x - y}"
    if max(x, y) < 10:
        return question("sum", text, result, "" if draw.chance(0.5) else None)
    if draw.chance(0.75):
        return question("sum", text, result, working(x, y, op))
    return question("sum", text, f"{working(x, y, op)} {result}")


def word_problem(draw: Draw) -> Sample:
    """A sum or difference inside a tiny tale."""
    x, y, op = _operands(draw)
    one, other = draw.some(w.NAMES, 2)
    he = "she" if one in w.GIRLS else "he"
    things, place = draw.one(_THINGS), draw.one(w.PLACES)
    if op == "+":
        text, ending = draw.one(
            (
                (f"{one} has {x} {things}. {other} brings {y} more. How many {things} are there now?", "There are"),
                (f"{one} has {x} {things} and {other} has {y}. How many {things} do they have together?", "They have"),
                (
                    f"There are {x} {things} at {place}. Then {one} puts {y} {things} beside them. How many {things} "
                    "are at the place?",
                    "There are",
                ),
            )
        )
    else:
        text, ending = draw.one(
            (
                (f"{one} has {x} {things}. {he.capitalize()} gives {y} of them to {other}. How many {things} does "
                 f"{one} have left?", f"{one} has"),
                (f"{one} has {x} {things} and {other} has {y}. How many more {things} does {one} have?",
                 "The difference is"),
                (f"At {place} {one} counts {x} {things}. {y} of them are sold. How many {things} are left?",
                 "There are"),
            )
        )  # fmt: skip
    result = x + y if op == "+" else x - y
    answer = f"{ending} {result} {things}."
    steps = f"{x} {op} {y}. {working(x, y, op)}"
    return (
        question("word_problem", text, answer, steps)
        if draw.chance(0.75)
        else question("word_problem", text, f"{steps} {answer}")
    )
