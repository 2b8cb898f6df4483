"""How an engine is set up: limits, memory, caching. Names and meanings are vLLM's where it has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from finback.base.runtime import ConfigError, nearest
from finback.engine.request import SpeculativeConfig
from finback.engine.runner import default_page_tokens, page_bytes, page_windows

PREFILLS = ("exact_tail", "full", "window_tail")
DEFAULT_CACHE_BYTES = 2 * 2**30


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """max_num_seqs: requests that run at once. max_num_batched_tokens: tokens of one forward; longer prompts are cut.
    max_model_len: prompt and output together, None = the model's positions. max_queued_requests: requests that may
    wait, None = any number. block_size: tokens of a page, a multiple of every compression ratio (None: 64 or more).

    kv_cache_memory_bytes: for all rows; None = what `max_num_seqs` requests of `max_model_len` tokens take, but at most
    2 GiB. When it is used up, the request that arrived last starts over later. enable_prefix_caching: reuse the rows of
    equal beginnings. prefix_keep_pages: keep the windows of every that many pages' border for as long as those of a
    prompt's end; others only while memory is free (0: all others).

    prefill: "exact_tail" runs layers that only need a prompt's tail on its tail; equal to "full". A prompt can then
    reuse a beginning that it shares with one other prompt as far as that ends before its own tail; from the third one
    on, and with "full" at once, all of it. "window_tail" runs those layers on the last window alone, which is faster
    still and only approximately right; it turns prefix caching off.

    deterministic: the same request gives the same bytes whatever runs beside it, at the price of padded and cut
    products (`kernels.deterministic`); SpikeWhale models run one token a forward. speculative: None = no drafts.

    Raises ConfigError for values that cannot be used."""

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    max_queued_requests: int | None = None
    block_size: int | None = None
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    prefix_keep_pages: int = 0
    prefill: str = "exact_tail"
    deterministic: bool = False
    backend: str = "auto"
    speculative: SpeculativeConfig | None = None

    def __post_init__(self) -> None:
        if self.prefill not in PREFILLS:
            hint = nearest(self.prefill, PREFILLS)
            raise ConfigError(f"prefill {self.prefill!r}{hint}; use one of {', '.join(PREFILLS)}")
        for name, least in (("max_num_seqs", 1), ("max_num_batched_tokens", 1), ("prefix_keep_pages", 0)):
            self._at_least(name, least)
        for name in ("max_model_len", "max_queued_requests", "block_size", "kv_cache_memory_bytes"):
            if getattr(self, name) is not None:
                self._at_least(name, 1)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is less than max_num_seqs {self.max_num_seqs}; "
                "every running request needs one token a step"
            )

    def _at_least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{name} is {value!r}; it must be an integer >= {least}")

    @property
    def caches_prefixes(self) -> bool:
        return self.enable_prefix_caching and self.prefill != "window_tail"


def page_tokens_for(model: Any, block_size: int | None) -> int:
    """Tokens of a page. Raises ConfigError where a compression group would not fit whole pages."""
    groups = model.row_groups()
    if block_size is None:
        return default_page_tokens(groups)
    bad = next((g for g in groups if block_size % g.stride), None)
    if bad is not None:
        raise ConfigError(f"block_size {block_size} is no multiple of {bad.stride}, the ratio of rows {bad.name!r}")
    return block_size


def page_counts(model: Any, args: EngineArgs, page_tokens: int, max_len: int) -> dict[str, int]:
    """Pages by class, the hole included.

    Classes with a window get what all requests, one forward and as many kept borders again need; what is left of the
    memory goes to the classes that keep every row. Raises ConfigError where one request would not fit.
    """
    groups = model.row_groups()
    windows, sizes = page_windows(groups), page_bytes(groups, page_tokens, model.dtype)
    whole = -(-max_len // page_tokens)
    limit = DEFAULT_CACHE_BYTES if args.kv_cache_memory_bytes is None else args.kv_cache_memory_bytes
    counts, least = {}, {}
    for cls, window in windows.items():
        if window is not None:
            least[cls] = -(-window // page_tokens) + 1  # one row more than is read: see `Scheduler.commit`
            sequences = args.max_num_seqs * (3 if args.caches_prefixes else 1)
            counts[cls] = 1 + sequences * (least[cls] + 1) + -(-args.max_num_batched_tokens // page_tokens)
    smallest = sum(sizes[cls] * (1 + least.get(cls, 1)) for cls in windows)
    if limit < smallest:
        raise ConfigError(f"kv_cache_memory_bytes {limit} does not hold one request; use at least {smallest}")
    windowed = sum(sizes[cls] * n for cls, n in counts.items())
    if windowed > limit // 2:  # a small memory: windows get at most half of it
        for cls in counts:
            counts[cls] = max(1 + least[cls], counts[cls] * (limit // 2) // windowed)
        windowed = sum(sizes[cls] * n for cls, n in counts.items())
    full = [cls for cls, window in windows.items() if window is None]
    for cls in full:
        counts[cls] = 1 + max(1, min((limit - windowed) // sizes[cls] - 1, whole * args.max_num_seqs))
    return counts
