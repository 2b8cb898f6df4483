"""SpikeWhale in Hugging Face transformers: importing this module registers it with the Auto classes.

    import finback.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(folder)

The Hugging Face model holds the very modules of `finback.models.spikewhale`; only the outside differs. Its [B, S] ids
and 0/1 mask become packed ragged sequences: a masked token is taken out, wherever it stands, and takes no position. Its
cache is a row store that grows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from finback.base.runtime import RequestError
from finback.models.spikewhale.config import SpikeWhaleConfig
from finback.models.spikewhale.model import SpikeWhale
from finback.models.spikewhale.mtp import DRAFT_HIDDEN
from finback.models.spikewhale.weights import init_module
from finback.nn.rows import BatchRows, Chunk, ForwardBatch, PagedRows, page_class

_PAGE_TOKENS = 16
_OWN_KEYS = tuple(f for f in dataclasses.fields(SpikeWhaleConfig) if f.name not in ("model_type", "architectures"))


class SpikeWhaleHFConfig(PreTrainedConfig):
    """The keys of `finback.models.spikewhale.config.SpikeWhaleConfig` as a Hugging Face config."""

    model_type = "spikewhale"
    has_no_defaults_at_init = True
    keys_to_ignore_at_inference = ("cache",)

    def __init__(self, **kwargs: Any):
        for key in _OWN_KEYS:
            if key.name in kwargs:
                setattr(self, key.name, kwargs.pop(key.name))
            elif key.default is not dataclasses.MISSING:
                setattr(self, key.name, key.default)
        super().__init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], **kwargs: Any) -> Any:
        """As the base class; a config.json without `engram_hash` was trained with the released hash."""
        return super().from_dict({"engram_hash": "released", **config_dict}, **kwargs)

    def own(self) -> SpikeWhaleConfig:
        """The same settings, checked. Raises ConfigError."""
        return SpikeWhaleConfig.from_dict({k.name: getattr(self, k.name) for k in _OWN_KEYS if hasattr(self, k.name)})


class RowCache:
    """Rows of B sequences for `generate`: a `PagedRows` that doubles when it is full.

    columns: how many columns of ids it has seen, masked ones included. lengths: tokens stored for each sequence.
    """

    is_compileable = False
    is_croppable = True

    def __init__(self, model: SpikeWhale, sequences: int, device: torch.device):
        self.groups = [g for g in model.row_groups() if g.name != DRAFT_HIDDEN]  # nothing drafts here
        self.dtype, self.device = model.dtype, device
        self.columns, self.lengths = 0, [0] * sequences
        self.pages: list[list[int]] = [[] for _ in range(sequences)]
        self.used = self.capacity = 0
        self.store = self._make(4 * sequences)

    def _make(self, pages: int) -> PagedRows:
        self.capacity = pages
        counts = {page_class(g): pages for g in self.groups}
        return PagedRows(self.groups, counts, page_tokens=_PAGE_TOKENS, dtype=self.dtype, device=self.device)

    def _take(self, count: int) -> list[int]:
        """Numbers of `count` unused pages."""
        if self.used + count > self.capacity:
            old = self.store.tables
            self.store = self._make(max(2 * self.capacity, self.used + count))
            for key, table in old.items():
                self.store.tables[key][: len(table)] = table
        self.used += count
        return list(range(self.used - count, self.used))

    def extend(self, ids: list[list[int]], columns: int) -> list[Chunk]:
        """Room for the next tokens of every sequence. The chunks name all pages, so they hold until the next call."""
        chunks = []
        for b, new in enumerate(ids):
            start = self.lengths[b]
            self.lengths[b] += len(new)
            self.pages[b] += self._take(max(0, -(-self.lengths[b] // _PAGE_TOKENS) - len(self.pages[b])))
            pages = {page_class(g): self.pages[b] for g in self.groups}
            chunks.append(Chunk(new, start, pages=pages))
        self.columns += columns
        return chunks

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence b becomes a copy of sequence beam_idx[b]."""
        parents = beam_idx.tolist()
        chosen = [self.pages[b] for b in parents]
        self.lengths = [self.lengths[b] for b in parents]
        source = torch.tensor([page for pages in chosen for page in pages], device=self.device)
        kept = {key: table.unflatten(0, (self.capacity, -1))[source] for key, table in self.store.tables.items()}
        self.used, self.pages = 0, []
        for pages in chosen:
            self.pages.append(self._take(len(pages)))
        for key, rows in kept.items():
            self.store.tables[key].unflatten(0, (self.capacity, -1))[: self.used] = rows

    def crop(self, max_length: int) -> None:
        """Forget columns past `max_length`, or the last `-max_length` ones; none of those may have been masked."""
        dropped = -max_length if max_length <= 0 else max(0, self.columns - max_length)
        self.columns -= dropped
        self.lengths = [max(0, n - dropped) for n in self.lengths]


class SpikeWhaleLM(PreTrainedModel, GenerationMixin):
    """SpikeWhaleLM v2 as a Hugging Face model. The loss is the family's own (see `finback.models.spikewhale.loss`)."""

    config_class = SpikeWhaleHFConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012 the base class wants lists
    # Norms run in float32; a hash of rounded directions would be another hash.
    _keep_in_fp32_modules_strict = ["norm", "compressor", "lookup.hash_proj"]  # noqa: RUF012
    # Files of tied models may hold a copy of the embedding; without a head of its own this model has no use for it.
    _keys_to_ignore_on_load_unexpected = ["lm_head.weight"]  # noqa: RUF012

    def __init__(self, config: SpikeWhaleHFConfig):
        super().__init__(config)
        core = SpikeWhale(config.own())
        self.model, self.lm_head, self.mtp_heads = core.model, core.lm_head, core.mtp_heads
        self.__dict__["_core"] = core  # not a submodule: its parts are registered above, under their published names
        self.post_init()

    @property
    def core(self) -> SpikeWhale:
        """The finback model made of this model's parts, whoever may have replaced one of them."""
        core = self.__dict__["_core"]
        core.model, core.lm_head, core.mtp_heads = self.model, self.lm_head, self.mtp_heads
        core.dtype = self.model.embed_tokens.weight.dtype
        return core

    def _init_weights(self, module: nn.Module) -> None:
        init_module(module, self.__dict__["_core"].config)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def set_input_embeddings(self, value: Any) -> None:
        self.model.embed_tokens = value

    def get_output_embeddings(self) -> nn.Module | None:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        self.lm_head = new_embeddings

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """`generate` is not to bring a cache of keys and values only: `forward` makes its own."""
        return False

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        cache: RowCache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
    ) -> CausalLMOutputWithPast | tuple:
        """Logits [B, S, V] (of the last `logits_to_keep` columns; 0: all), and with labels the loss.

        input_ids: [B, S]. attention_mask: None, or 0/1 [B, S], with a cache also [B, columns before + S]; tokens with 0
        are left out. A masked column repeats the logits of the token before it, and is 0 where there is none.
        labels: [B, S] beside input_ids, -100 = no target; the shift happens here. use_cache: return the cache for the
        next call; nothing that is cached has a gradient. Raises RequestError.
        """
        if cache is None and use_cache:
            cache = RowCache(self.core, len(input_ids), input_ids.device)
        real = _real_tokens(input_ids, attention_mask, 0 if cache is None else cache.columns)
        ids = [row[keep].tolist() for row, keep in zip(input_ids, real, strict=True)]
        with torch.set_grad_enabled(torch.is_grad_enabled() and cache is None):
            if cache is None:
                batch = ForwardBatch([Chunk(new) for new in ids], device=input_ids.device)
                view = BatchRows(self.core.row_groups()).view(batch)
            else:
                batch = ForwardBatch(cache.extend(ids, input_ids.shape[1]), device=input_ids.device)
                view = cache.store.view(batch)
            hidden, aux = self.core.forward_with_aux(batch, view)
            places = _places(real)[:, -logits_to_keep:]
            logits = self._logits_at(hidden, places)
            loss = None if labels is None else self.core.loss(batch, hidden, aux, labels[real]).total
        kept: Any = cache  # has what `generate` asks of a cache, without the layers of keys and values
        output = CausalLMOutputWithPast(loss=loss, logits=logits, cache=kept)
        return output if return_dict is not False else output.to_tuple()

    def _logits_at(self, hidden: Tensor, places: Tensor) -> Tensor:
        """hidden [T, D], places [B, n] into it (-1 = none) -> [B, n, V]."""
        if not len(hidden):
            return hidden.new_zeros(*places.shape, self.core.vocab_size)
        logits = self.core.logits(hidden[places.clamp(min=0)])
        return logits.masked_fill((places < 0).unsqueeze(2), 0.0)


def _real_tokens(input_ids: Tensor, mask: Tensor | None, before: int) -> Tensor:
    """[B, S] bool: which ids are tokens. `before`: columns that a cache already holds. Raises RequestError."""
    if input_ids.ndim != 2:
        raise RequestError(f"input_ids has shape {list(input_ids.shape)}; give [batch, length]")
    if mask is None:
        return torch.ones_like(input_ids, dtype=torch.bool)
    count, width = input_ids.shape
    allowed = {(count, width), (count, before + width)}
    if tuple(mask.shape) not in allowed:
        shapes = " or ".join(str(list(shape)) for shape in sorted(allowed))
        raise RequestError(
            f"attention_mask has shape {list(mask.shape)}; give {shapes} with 1 for tokens and 0 for padding. "
            "Causality needs no mask here"
        )
    if bool(((mask != 0) & (mask != 1)).any()):
        raise RequestError("attention_mask holds values other than 0 and 1; additive masks have no meaning here")
    return mask[:, mask.shape[1] - width :] != 0


def _places(real: Tensor) -> Tensor:
    """[B, S] bool -> [B, S] int64: the packed index of each token; a masked column has that of the last token before it
    in its row, -1 if there is none."""
    packed = real.flatten().cumsum(0).view_as(real) - 1
    return packed.masked_fill(~real, -1).cummax(dim=1).values


AutoConfig.register("spikewhale", SpikeWhaleHFConfig)
AutoModelForCausalLM.register(SpikeWhaleHFConfig, SpikeWhaleLM)
