"""Conversations as training documents: token ids exactly as they are served, and which of them are learned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from finback.io.chat import Chat
from finback.io.conversation import ChatOptions, Control, Image, Message, Piece, Tool


@dataclass
class Rendered:
    """ids and learn: one entry a token; learn: whether it is the assistant's to say. images: the files of the images,
    each of which has one token of the ids."""

    ids: list[int] = field(default_factory=list)
    learn: list[bool] = field(default_factory=list)
    images: list[bytes] = field(default_factory=list)


def render(
    chat: Chat, messages: Sequence[Message], tools: Sequence[Tool] = (), options: ChatOptions | None = None
) -> Rendered:
    """A conversation that ends with an answer of the assistant.

    Its ids begin with those of the prompt `chat.render(messages[:-1], tools, options)`, images aside. Learned is what a
    model that is given the prompt has to write: of every answer, all that follows the token that says whether to think,
    up to its end token.
    """
    assert messages and messages[-1].role == "assistant", "a conversation to learn from ends with an answer"
    # A prefix is an answer that is written down with its reasoning, and without its end token.
    whole = [*messages[:-1], replace(messages[-1], prefix=True)]
    out = Rendered()
    run: list[Piece] = []
    answering, learned = False, False
    for piece in [*chat.format.pieces(whole, tools, options or ChatOptions()), Control("eos")]:
        run.append(piece)
        role = piece.role if isinstance(piece, Control) else None
        begins = answering and not learned and role in ("think", "end_think")
        if begins or role == "eos":  # no text is cut at a control token
            ids = chat.encode(run)
            out.ids += ids
            out.learn += [learned] * len(ids)
            out.images += [piece.data for piece in run if isinstance(piece, Image)]
            run, learned = [], begins
        answering = role == "assistant" or (answering and role != "eos")
    return out
