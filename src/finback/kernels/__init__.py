"""The one interface to numerical work: functions of tensors and plain facts, each with an exact torch twin.

`kernels.name(...)` runs the twin of the chosen backend. `backend("torch")` chooses for a block of code; the default
"auto" takes a faster twin where one exists for the device, dtype, shape and gradient at hand, and torch otherwise.
`explain()` lists which twin each operation would use. Letters in shapes: T tokens, B sequences, D dim, H heads, E
experts, K experts per token, M residual copies, V vocabulary; see docs/glossary.md.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Generator, Iterator, Sequence
from contextvars import ContextVar
from functools import lru_cache
from types import ModuleType

from torch import Tensor, cuda, float64, is_grad_enabled
from torch import dtype as DType

from finback.base.runtime import KernelUnavailable, nearest
from finback.kernels.torch import attention as _attention
from finback.kernels.torch import dense_attention as _dense
from finback.kernels.torch import fixed as _fixed
from finback.kernels.torch import grouped as _grouped
from finback.kernels.torch import matmul as _matmul
from finback.kernels.torch import moe as _moe
from finback.kernels.torch import quant as _quant
from finback.kernels.torch import stream as _stream
from finback.kernels.torch import training as _training
from finback.kernels.torch.attention import accumulator as accumulator
from finback.kernels.torch.attention import cast as cast
from finback.kernels.torch.grouped import Groups as Groups
from finback.kernels.torch.matmul import PackedWeight as PackedWeight
from finback.kernels.torch.training import FUSED_ATTENTION as FUSED_ATTENTION

BACKENDS = ("auto", "torch")
_backend: ContextVar[str] = ContextVar("finback_backend", default="auto")


def check_backend(name: str) -> str:
    """`name` if it is a backend of this build, else KernelUnavailable."""
    if name not in BACKENDS:
        hint = nearest(name, BACKENDS)
        raise KernelUnavailable(f"backend {name!r} is not available{hint}; use one of {', '.join(BACKENDS)}")
    return name


@contextlib.contextmanager
def backend(name: str) -> Generator[None]:
    """Run the block's kernels on backend `name` ("auto" or "torch"). Raises KernelUnavailable for other names."""
    token = _backend.set(check_backend(name))
    try:
        yield
    finally:
        _backend.reset(token)


@contextlib.contextmanager
def deterministic(on: bool = True) -> Generator[None]:
    """Let no token's result depend on its neighbours inside the block, not even in the last bit (`on` False: as usual).

    Products run in padded blocks of fixed shape. The cost on a CPU, measured at dim 1024: packed bfloat16 weights make
    prompts take 1.1 times as long, a decode step of one sequence 1.6 times, of sixteen 1.1 times; in float32 it is 1.8,
    4 and 1.2 times. It holds for one machine, one torch and one number of threads, and for the torch backend alone.
    """
    token = _fixed.deterministic.set(on)
    try:
        yield
    finally:
        _fixed.deterministic.reset(token)


def is_deterministic() -> bool:
    """Whether the code runs inside `deterministic`."""
    return _fixed.deterministic.get()


def explain() -> dict[str, str]:
    """Operation name -> backend that runs it here; "triton" where it does so in training on a GPU."""
    found = dict.fromkeys(sorted(OPERATIONS), "torch")
    if _backend.get() != "torch" and cuda.is_available() and _triton("hyper") is not None:
        found |= dict.fromkeys(FUSED, "triton")
    return found


@lru_cache
def _triton(name: str) -> ModuleType | None:
    """A module of fused twins, None without triton (torch for CPUs comes without it)."""
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module(f"finback.kernels.triton.{name}")


def _fused(x: Tensor, module: str) -> ModuleType | None:
    """The fused twins of that module if they are to be used for x: training on a GPU."""
    if not (x.is_cuda and is_grad_enabled()) or x.dtype == float64 or _backend.get() == "torch":
        return None
    return None if is_deterministic() else _triton(module)


def _fused_streams(streams: Tensor) -> ModuleType | None:
    """Those of hyper-connections, for residual copies or matrices [T, M, ...]."""
    copies = streams.shape[1]
    return None if copies & (copies - 1) else _fused(streams, "hyper")


# -- attention ---------------------------------------------------------------------------------------------------------


def sparse_attention(
    q: Tensor,
    scopes: Sequence[tuple[Tensor, Tensor]],
    sink: Tensor | None,
    scale: float,
    *,
    value_width: int | None = None,
    released_columns: Sequence[int] | None = None,
) -> Tensor:
    """Attention of each token over picked rows of one shared key-and-value (MQA), with or without a sink.

    q: [T, H, h]. scopes: (rows [N, h], index [T, k] int64) pairs; index picks rows, -1 = none. Scopes are
    alternatives of one softmax: nothing is concatenated by the caller. sink: [H], a plain logit (not scaled) without
    a value row; None: no sink. value_width v: a row is its own key, its first v values are its value (None: all h, K
    = V). With z = scale * q . rows[index]: out = sum exp(z) rows[:v] / (sum exp(z) + exp(sink)), computed in float32
    (float64 for float64), rounded once. A token without any row gives exactly 0. A row picked twice counts twice.
    Returns [T, H, v] in q's dtype.

    released_columns: None = weights are exact. Otherwise the place of each scope's first column in the list of the
    released kernel (ascending, scopes do not overlap), which walks that list in runs of 64: with m the highest z up to
    and including a row's own run, the weight exp(z - m) is rounded to bf16 where it multiplies the row, not in the sum
    below the bar. Places decide only where runs end, so they must not depend on what else is in the batch.
    """
    if released_columns is None and is_grad_enabled() and len(q):
        if q.requires_grad or any(rows.requires_grad for rows, _ in scopes):
            layout = _training.layout_of(scopes)
            if _training.dense_pays(q, scopes, layout):
                return _training.masked_attention(q, scopes, sink, scale, value_width=value_width, layout=layout)
    return _attention.sparse_attention(
        q, scopes, sink, scale, value_width=value_width, released_columns=released_columns
    )


def masked_attention(
    q: Tensor,
    scopes: Sequence[tuple[Tensor, Tensor]],
    sink: Tensor | None,
    scale: float,
    *,
    value_width: int | None = None,
) -> Tensor:
    """`sparse_attention` by dense scores over the range of rows that neighbouring tokens pick from, and a mask.

    The same arguments and result. `sparse_attention` takes this form by itself where gradients are wanted and it needs
    less memory: the backward pass keeps [T, H, range] weights instead of [T, k, h] copies of keys.
    """
    return _training.masked_attention(q, scopes, sink, scale, value_width=value_width)


def attention_mass(
    q: Tensor, scopes: Sequence[tuple[Tensor, Tensor]], sink: Tensor | None, scale: float
) -> list[Tensor]:
    """How much attention each picked row gets: its weight in the one softmax over all scopes and the sink, summed over
    heads. Arguments as `sparse_attention`. Returns one [T, k] float32 (float64) per scope, 0 at -1, without gradient.
    """
    return _training.attention_mass(q, scopes, sink, scale)


def index_scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Scores of every key for every token: sum over heads of weights * relu(q . key), in float32 (float64).

    q: [T, H, h]; weights: [T, H], all constant factors folded in; keys: [n, h]. Returns [T, n].
    Per-head scores are never stored for more than one block of tokens.
    """
    return _attention.index_scores(q, weights, keys)


def index_scores_of_sequences(
    q: Tensor, weights: Tensor, keys: Sequence[Tensor], lengths: Sequence[int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """`index_scores` of B packed sequences, each against its own keys [n, h], several sequences at a time.

    q: [T, H, h], weights: [T, H]; lengths: B ints, tokens of each sequence (sum T). Yields (tokens [m] int64, scores
    [m, most keys]); what stands in a line after its sequence's own keys means nothing.
    """
    return _training.index_scores_of_sequences(q, weights, keys, lengths)


def index_scores_at(q: Tensor, weights: Tensor, table: Tensor, index: Tensor) -> Tensor:
    """`index_scores` of chosen rows only: table [N, h], index [T, C] int64 (-1 = none). Returns [T, C], -inf at -1.
    Work and memory are proportional to C, not to the number of keys."""
    return _attention.index_scores_at(q, weights, table, index)


def top_rows(scores: Tensor, k: int, visible: Tensor) -> Tensor:
    """The k best columns of each row among its first `visible`, ties to the lowest column.

    scores: [T, n]; visible: [T] int64. Returns [T, min(k, n)] int64, ascending, -1 after the last pick.
    Raises NonFiniteError on NaN scores.
    """
    return _attention.top_rows(scores, k, visible)


def top_blocks(scores: Tensor, n_blocks: int, block: int, visible: Tensor) -> Tensor:
    """First level of the two-level selection: the best `n_blocks` blocks of `block` columns, a block being worth its
    best visible column. The block of the newest visible column is always kept. Ties to the lowest block.

    scores: [T, n]; visible: [T] int64. Returns [T, min(n_blocks, ceil(n / block))] int64 block numbers, ascending, -1 =
    none.
    """
    return _attention.top_blocks(scores, n_blocks, block, visible)


def causal_attention(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    lengths: Sequence[int],
    scale: float,
    derf: tuple[Tensor, Tensor, Tensor] | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Dense causal attention of B packed sequences, each over its own rows only.

    q: [T, H, h], the new tokens. lengths: B ints, new tokens of each (sum T, 0 is allowed). keys, values: B tensors
    [n, G, h] and [n, G, v], all rows of each sequence, the new tokens' last; G divides H, and heads share keys in
    runs of H / G. Query i of m sees the first n - m + i + 1 rows. With z = scale * q . key:
    out = sum w value / sum w, w = exp(z), or with derf = (alpha, bias, gamma), each [H]:
    out = sum w value / (sum w + 1e-8), w = gamma (erf(alpha z + bias) + 1) / 2.
    dropout: chance that a normalised weight is zeroed (the others are scaled up). Returns [T, H, v] in q's dtype.
    """
    return _dense.causal_attention(q, keys, values, lengths, scale, derf, dropout)


def exclude_self(y: Tensor, own: Tensor) -> Tensor:
    """XSA: each head's output without its part along the token's own value: y - (y . u) u, u = own / (|own| + 1e-8).

    y: [T, H, v]; own: [T, G, v], shared by runs of H / G heads. Returns [T, H, v].
    """
    return _dense.exclude_self(y, own)


def pool_groups(values: Tensor, scores: Tensor) -> Tensor:
    """Softmax pooling of groups, per channel: values, scores [n, r, h] -> [n, h]."""
    return _attention.pool_groups(values, scores)


# -- stream ------------------------------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, in float32 (float64), rounded once to x's dtype."""
    return _stream.rms_norm(x, weight, eps)


def rotate_pairs(x: Tensor, turns: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotary embedding of the last 2r values of x, adjacent values (2j, 2j+1) being one complex number.

    x: [T, h] or [T, H, h]; turns: [T, r] complex, |turn| = 1. inverse: turn back. Returns a new tensor of x's dtype.
    """
    return _stream.rotate_pairs(x, turns, inverse=inverse)


def rotate_halves(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary embedding of the *first* 2r values of x, (j, j + r) being one complex number. Shapes as `rotate_pairs`."""
    return _stream.rotate_halves(x, turns)


def widen_streams(streams: Tensor) -> Tensor:
    """Residual copies [T, M, D] in the type that `hc_mixes`, `hc_collapse` and `hc_expand` take: the accumulation type,
    or as they are where those compute in it inside and what they write is rounded once."""
    return streams if _fused_streams(streams) is not None else cast(streams, accumulator(streams.dtype))


def hc_mixes(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, *, iterations: int, norm_eps: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Coefficients of a hyper-connection from the residual copies themselves.

    streams: [T, M, D] of `widen_streams`; fn: [(2 + M) M, M D]; scale: [3] (pre, post, comb); base: [(2 + M) M].
    One RMS statistic over all M D values of a token. mixes = (fn . flat(streams)) / rms, then with z = mix * scale +
    base: pre [T, M] = sigmoid(z) + eps; post [T, M] = 2 sigmoid(z); comb [T, M, M] = sinkhorn(z), rows = source copy.
    """
    twin = _fused_streams(streams) or _stream
    return twin.hc_mixes(streams, fn, scale, base, iterations=iterations, norm_eps=norm_eps, eps=eps)


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Doubly stochastic matrices [T, M, M]: row softmax + eps, column normalisation, then `iterations` - 1 times rows
    and columns; every divisor but the softmax's has eps added."""
    return (_fused_streams(logits) or _stream).sinkhorn(logits, iterations, eps)


def hc_collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """Sublayer input: sum over copies of pre * stream. [T, M, D], [T, M] -> [T, D]."""
    return (_fused_streams(streams) or _stream).hc_collapse(streams, pre)


def hc_expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """New copies: out[k] = post[k] y + sum_i comb[i, k] streams[i]. y: [T, D] -> [T, M, D]."""
    return (_fused_streams(streams) or _stream).hc_expand(y, streams, post, comb)


def engram_gate(streams: Tensor, key: Tensor, weight: Tensor, eps: float) -> Tensor:
    """How far an n-gram memory opens per token and copy: sigmoid(signed sqrt of the normalised product of stream and
    key).

    streams, key: [T, M, D] float32/64; weight: [M, D] (query weight times key weight); each (token, copy) is normalised
    on its own. Returns [T, M].
    """
    return _stream.engram_gate(streams, key, weight, eps)


# -- mixture of experts ------------------------------------------------------------------------------------------------


def router_scores(logits: Tensor, score: str) -> Tensor:
    """[T, E] logits -> scores: "softmax", "sigmoid" or "sqrtsoftplus"."""
    return _moe.router_scores(logits, score)


def top_experts(scores: Tensor, k: int) -> Tensor:
    """[T, E] -> [T, k] int64, best first, ties to the lowest expert."""
    return _moe.top_experts(scores, k)


def swiglu(gate_up: Tensor, limit: float = 0.0) -> Tensor:
    """silu(gate) * up of [..., 2I] = gate | up. limit > 0 clamps gate from above and up on both sides."""
    return _moe.swiglu(gate_up, limit)


def weighed_swiglu(gate_up: Tensor, weights: Tensor | None, limit: float = 0.0) -> Tensor:
    """`swiglu` of gate_up [n, 2I] in float32 (float64), times weights [n, 1] where given, rounded once to its dtype."""
    return (_fused(gate_up, "gated") or _moe).weighed_swiglu(gate_up, weights, limit)


def for_each_expert(
    x: Tensor, weights: Tensor, experts: Tensor, run: Callable[[int, Tensor, Tensor], Tensor], out: Tensor
) -> Tensor:
    """out + sum of run(expert, rows of x, their routing weights [n, 1]) over the experts in use, in ascending order.

    x: [T, D]; weights, experts: [T, K]; out: [T, D] accumulator. Each token's sum has the same order in every batch.
    """
    return _moe.for_each_expert(x, weights, experts, run, out)


def group_rows(experts: Tensor, stack: Tensor) -> Groups:
    """How the rows of T tokens are sorted by expert, for products with `stack` [E, n, k]. experts: [T, K] int64.

    P rows in all: T K, and on a GPU some padding. Training's form of `for_each_expert`: no loop over experts, and on a
    GPU no wait for the host.
    """
    padded = _grouped.has_grouped_products(stack.device, stack.dtype)
    return _grouped.group_rows(experts, len(stack), padded)


def spread_rows(x: Tensor, groups: Groups) -> Tensor:
    """[T, k] -> [P, k]: each token's values in the rows of its experts."""
    return _grouped.spread_rows(x, groups)


def spread_weights(weights: Tensor, groups: Groups) -> Tensor:
    """Routing weights [T, K] -> [P, 1], 0 in padding, where something has to be multiplied by them."""
    return _grouped.spread_weights(weights, groups)


def grouped_linear(x: Tensor, stack: Tensor, groups: Groups) -> Tensor:
    """Rows [P, k] times their expert's matrix: stack [E, n, k] -> [P, n]."""
    return _grouped.grouped_linear(x, stack, groups)


def collect_rows(y: Tensor, groups: Groups, out: Tensor) -> Tensor:
    """out [T, n] plus the sum of each token's rows of y [P, n], summed in out's dtype, best expert first."""
    return _grouped.collect_rows(y, groups, out)


# -- products ----------------------------------------------------------------------------------------------------------


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: DType | None = None) -> Tensor:
    """x [..., k] times weight [n, k] transposed, plus bias [n]. dtype: compute and return in that type."""
    return _matmul.linear(x, weight, bias, dtype)


def pack_linear(weight: Tensor) -> PackedWeight | None:
    """A bf16 CPU weight [n, k] in a form that multiplies faster here with float32 sums, or None where there is none or
    where it could not hold the values exactly."""
    return _matmul.pack_linear(weight)


def packed_linear(x: Tensor, weight: PackedWeight, dtype: DType | None = None) -> Tensor:
    """x [..., k] times a packed weight, summed in float32, rounded once to `dtype` (default: x's)."""
    return _matmul.packed_linear(x, weight, dtype)


# -- rounding ----------------------------------------------------------------------------------------------------------


def round_e4m3(x: Tensor, block: int = 32, pow2: bool = True) -> Tensor:
    """x rounded to FP8 with one scale per `block` values of the last dim and back, as the released kernels store it."""
    return _quant.round_e4m3(x, block, pow2)


def round_e2m1(x: Tensor, block: int = 32, scale: str = "e8m0") -> Tensor:
    """x rounded to FP4 with one scale ("e8m0" or "e4m3") per `block` values of the last dim and back."""
    return _quant.round_e2m1(x, block, scale)


def hadamard(x: Tensor) -> Tensor:
    """Orthonormal Walsh-Hadamard transform of the last dim (a power of two)."""
    return _quant.hadamard(x)


FUSED = ("widen_streams", "hc_mixes", "sinkhorn", "hc_collapse", "hc_expand", "weighed_swiglu")
OPERATIONS = (
    "sparse_attention",
    "masked_attention",
    "attention_mass",
    "index_scores",
    "index_scores_of_sequences",
    "index_scores_at",
    "top_rows",
    "top_blocks",
    "causal_attention",
    "exclude_self",
    "pool_groups",
    "rms_norm",
    "rotate_pairs",
    "rotate_halves",
    "widen_streams",
    "hc_mixes",
    "sinkhorn",
    "hc_collapse",
    "hc_expand",
    "engram_gate",
    "router_scores",
    "top_experts",
    "swiglu",
    "weighed_swiglu",
    "for_each_expert",
    "group_rows",
    "spread_rows",
    "spread_weights",
    "grouped_linear",
    "collect_rows",
    "linear",
    "pack_linear",
    "packed_linear",
    "round_e4m3",
    "round_e2m1",
    "hadamard",
)
