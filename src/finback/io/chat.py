"""From a chat to token ids and images: the one place where control tokens and what people typed meet.

Control tokens come from the format alone, by id. Everything else is encoded without the added vocabulary, so that
typing "</think>" or "<｜User｜>" gives ordinary tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finback.base.runtime import ConfigError, RequestError
from finback.io.chat_jinja import JinjaChat
from finback.io.chat_v32 import DeepseekV32Chat
from finback.io.chat_v41 import DeepseekV41Chat
from finback.io.conversation import ChatFormat, ChatOptions, ChatParser, Image, Message, Piece, Tool
from finback.io.images import MAX_PIXELS, ImageInput, decode_image, expand_placeholders, prepare_image
from finback.io.text import Tokenizer


@dataclass(frozen=True)
class RenderedPrompt:
    """token_ids: spans of images expanded. images: with their places in token_ids."""

    token_ids: list[int]
    images: list[ImageInput]

    def as_prompt(self) -> dict[str, Any]:
        """The prompt in the form that `LLM.generate` takes."""
        return {"prompt_token_ids": self.token_ids, "images": self.images}


@dataclass(frozen=True)
class ImageSizes:
    """How a model wants its images: keywords of `prepare_image`, and the id of a placeholder."""

    image_token_id: int
    patch: int
    downsample: int
    max_tokens: int
    min_pixels: int
    max_wh_ratio: int | None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ImageSizes | None:
        """From a parsed config.json; None for a model without vision."""
        vision, token = config.get("vision_config"), config.get("image_token_id")
        if not vision or token is None:
            return None
        return cls(
            token,
            vision.get("patch_size", 14),
            vision.get("downsample_ratio", 3),
            vision.get("max_image_tokens", 1024),
            vision.get("min_pixels", 544 * 544),
            vision.get("max_wh_ratio"),
        )


class Chat:
    """A chat format together with a tokenizer and image sizes.

    images: None for a model that takes none. max_pixels: largest image that is decoded.
    """

    def __init__(
        self,
        format: ChatFormat,
        tokenizer: Tokenizer,
        images: ImageSizes | None = None,
        *,
        max_pixels: int = MAX_PIXELS,
    ):
        self.format, self.tokenizer = format, tokenizer
        self._sizes, self._max_pixels = images, max_pixels

    @classmethod
    def of(cls, config: Mapping[str, Any], tokenizer: Tokenizer, *, max_pixels: int = MAX_PIXELS) -> Chat:
        """The chat of a checkpoint, from its parsed config.json: DeepSeek-V4.1's own format; for others their Jinja
        template; DeepSeek-V3.2's own where there is no template. Raises ConfigError where there is neither, and where
        the vocabulary lacks the format's control tokens."""
        kind = config.get("model_type")
        if kind == "deepseek_v41":
            sizes = ImageSizes.of(config)
            token = None if sizes is None else sizes.image_token_id
            return cls(DeepseekV41Chat(tokenizer, image_token_id=token), tokenizer, sizes, max_pixels=max_pixels)
        if tokenizer.chat_template is not None:
            return cls(JinjaChat(tokenizer.chat_template, tokenizer), tokenizer)
        if kind == "deepseek_v32":
            return cls(DeepseekV32Chat(tokenizer), tokenizer)
        raise ConfigError(
            f"model_type {kind!r} has no chat format of its own, and the checkpoint brings no template: chat_template "
            "in tokenizer_config.json, or chat_template.jinja. Continue plain text instead (finback generate, "
            "/v1/completions)"
        )

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), options: ChatOptions | None = None
    ) -> RenderedPrompt:
        """The prompt of a chat. Raises RequestError: no messages, an image that cannot be read or that the model does
        not take, text that the vocabulary cannot hold."""
        if not messages:
            raise RequestError("there are no messages; give at least one")
        pieces = list(self.format.pieces(messages, tools, options or ChatOptions()))
        images = [piece for piece in pieces if isinstance(piece, Image)]
        sizes = self._sizes
        if images and sizes is None:
            raise RequestError("this model takes no images (its config has no vision_config); send text only")
        ids = self.encode(pieces)
        if sizes is None:
            return RenderedPrompt(ids, [])
        prepared = [
            prepare_image(
                decode_image(image.data, max_pixels=self._max_pixels),
                patch=sizes.patch,
                downsample=sizes.downsample,
                max_tokens=sizes.max_tokens,
                min_pixels=sizes.min_pixels,
                max_wh_ratio=sizes.max_wh_ratio,
            )
            for image in images
        ]
        return RenderedPrompt(*expand_placeholders(ids, prepared, sizes.image_token_id))

    def encode(self, pieces: Iterable[Piece]) -> list[int]:
        """Token ids of a prompt's pieces, one placeholder an image. Texts that touch are encoded as one."""
        ids: list[int] = []
        text = ""
        for piece in pieces:
            if isinstance(piece, str):
                text += piece
                continue
            ids += self.tokenizer.encode(text) if text else []
            ids.append(self.format.token_id("image" if isinstance(piece, Image) else piece.role))
            text = ""
        return ids + (self.tokenizer.encode(text) if text else [])

    def parser(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), options: ChatOptions | None = None
    ) -> ChatParser:
        """A parser for the answer to that chat."""
        return self.format.parser(messages, tools, options or ChatOptions())
