"""Make the sources of the mini recipes from a folder of corpora.

    python recipes/mini/prepare.py CORPUS OUT

CORPUS holds the xz-compressed JSON lines that the model card names (NOTICE says where each comes from and under which
licence). OUT gets one file a source: running text as it is, the rest as chats, because that is how it will be asked.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_GLOSSES = 30_000
Chat = list[dict[str, str]]


def read(path: Path) -> Iterator[str]:
    with lzma.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)["text"]


def ask(question: str, answer: str) -> Chat:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer.strip()}]


def chitchat(texts: Iterable[str]) -> Iterator[Chat]:
    """Two people's turns; the first speaker is the user, and the last word is the assistant's."""
    for text in texts:
        turns = [turn.strip() for turn in json.loads(text)]
        turns = turns[: len(turns) // 2 * 2]
        if turns and all(turns):
            yield [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]


def definitions(texts: Iterable[str], draw: random.Random) -> Iterator[Chat]:
    """The lead paragraph of an article as the answer to a question for its title."""
    forms = ("What is {}?", "Tell me about {}.", "{}?", "Explain {} to me.")
    for text in texts:
        title, _, body = text.partition("\n\n")
        sentences = re.split(r"(?<=[.!?]) (?=[A-Z])", body.split("\n")[0])
        if len(body) > 40:
            yield ask(draw.choice(forms).format(title), " ".join(sentences[: draw.randint(1, 3)]))


def dishes(texts: Iterable[str], draw: random.Random) -> Iterator[Chat]:
    forms = ("How do I make {}?", "Give me a recipe for {}.", "I would like to cook {}. What do I need?")
    for text in texts:
        title, _, body = text.partition("\n\n")
        if body:
            yield ask(draw.choice(forms).format(title), body)


def meanings(texts: list[str], draw: random.Random) -> Iterator[Chat]:
    forms = ('What does "{}" mean?', "Define {}.", "What is the meaning of {}?")
    draw.shuffle(texts)
    for text in texts[:_GLOSSES]:
        word, _, gloss = text.partition(" (")
        kind, _, meaning = gloss.partition("): ")
        if meaning:
            yield ask(draw.choice(forms).format(word), f"{word} ({kind}): {meaning}")


def write(path: Path, documents: Iterable[Any]) -> None:
    count = 0
    with lzma.open(path, "wt", encoding="utf-8") as file:
        for document in documents:
            file.write(json.dumps({"text": document}, ensure_ascii=False) + "\n")
            count += 1
    print(f"{path.name}: {count} documents, {path.stat().st_size / 2**20:.1f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)

    def corpus(name: str) -> Iterator[str]:
        return read(given.corpus / f"{name}.jsonl.xz")

    draw = random.Random(0)
    for name in ("fiction_pulp", "fiction_classic", "austen", "wiki_vital"):
        write(given.out / f"{name}.jsonl.xz", corpus(name))
    write(given.out / "chitchat.jsonl.xz", chitchat(corpus("chat_chitchat")))
    write(given.out / "definitions.jsonl.xz", definitions(corpus("wiki_vital"), draw))
    write(given.out / "dishes.jsonl.xz", dishes(corpus("recipes"), draw))
    write(given.out / "meanings.jsonl.xz", meanings(list(corpus("wordnet_gloss")), draw))


if __name__ == "__main__":
    main()
