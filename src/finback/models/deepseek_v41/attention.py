"""V4.1's attention: a window of raw rows, and compressed rows shared by runs of layers and picked by an indexer.

For each token of layer l, with all rows shared by the heads (one key-and-value vector a position):
1. q = rope(wq_b(q_norm(wq_a x))); the window row is round_fp8(rope(kv_norm(wkv x))).
2. A *KV source* layer also pools every r tokens into one latent; its index keys come from the latent before rotation,
   its compressed row is round_fp4(rope(latent)) at the position of the group's first token.
3. An *index source* layer scores index keys and picks `index_topk` rows a token; the layers up to the next source reuse
   its pick. With a candidate source, later sources score only the blocks of rows that it kept.
4. One softmax over window rows, picked rows and a sink; the output is rotated back and projected in groups.

What sources hand to later layers is a `LayerShare`, returned by one layer and passed to the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from finback import kernels
from finback.models.deepseek_v41.config import TextConfig
from finback.nn.linear import ActRound, GroupedLinear, Linear, Weight
from finback.nn.norm_rope import RMSNorm, turns_at
from finback.nn.rows import ForwardBatch, RowView
from finback.nn.teacher import selection_kl


@dataclass(frozen=True)
class LayerShare:
    """What KV and index sources hand down the stack.

    compressed: [N, h] table of compressed rows. keys: [N, index_head_dim] table of index keys, always the keys of the
    owner of `compressed`. rows: [T, k] int64 row numbers (of the token's own sequence) each token attends to, -1 =
    none; selected: the same as physical rows of `compressed`.
    candidates: [T, c] int64 block numbers that later index sources may pick from, -1 = none; None = all rows.
    """

    compressed: Tensor | None = None
    keys: Tensor | None = None
    rows: Tensor | None = None
    selected: Tensor | None = None
    candidates: Tensor | None = None


@dataclass(frozen=True)
class Step:
    """One forward's view of the row store and its rotations. turns: [T, r] complex of window-only layers and of
    compressed ones; `freqs` of the latter serve the first positions of finished groups."""

    view: RowView
    window_turns: Tensor
    compressed_turns: Tensor
    compressed_freqs: Tensor
    dtype: torch.dtype

    @property
    def batch(self) -> ForwardBatch:
        return self.view.batch

    def narrow(self, firsts: Sequence[int]) -> Narrowed | None:
        """Keep each sequence's tokens from position firsts[b] on; None when those are all tokens."""
        if all(first <= start for first, start in zip(firsts, self.batch.starts, strict=True)):
            return None
        batch, kept = self.batch.narrow(firsts)
        view, window, compressed = self.view.rebind(batch), self.window_turns[kept], self.compressed_turns[kept]
        return Narrowed(replace(self, view=view, window_turns=window, compressed_turns=compressed), kept)

    def group_turns(self, ratio: int) -> Tensor:
        """[n, r] rotations of the groups that this forward finishes: a group stands at its first token."""
        if ratio == 1:
            return self.compressed_turns
        return turns_at(self.batch.finished(ratio).row * ratio, self.compressed_freqs, self.dtype)


@dataclass(frozen=True)
class Narrowed:
    """The step that goes on with some of a step's tokens, and their indices [T'] in it."""

    step: Step
    kept: Tensor

    def share(self, share: LayerShare) -> LayerShare:
        """`share` with its per-token choices for the kept tokens."""
        per_token = {name: getattr(share, name) for name in ("rows", "selected", "candidates")}
        return replace(share, **{name: t[self.kept] for name, t in per_token.items() if t is not None})


def compressed_group(ratio: int) -> str:
    return f"compressed/{ratio}"


def key_group(ratio: int) -> str:
    return f"index_key/{ratio}"


def raw_group(ratio: int) -> str:
    return f"raw/{ratio}"


class Compressor(nn.Module):
    """Pools each run of `ratio` tokens into one latent with a learned softmax gate per channel."""

    def __init__(self, c: TextConfig, ratio: int):
        super().__init__()
        self.ratio = ratio
        self.wkv = Weight(c.head_dim, c.hidden_size)
        if ratio > 1:
            self.wgate = Weight(c.head_dim, c.hidden_size)
        self.norm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def forward(self, x: Tensor, step: Step, layer: int) -> Tensor:
        """x [T, D] -> latents [n, h] of the groups finished in this forward, before rotation."""
        if self.ratio == 1:
            return self.norm(self.wkv.multiply(x))
        acc = kernels.accumulator(x.dtype)
        raw = torch.cat([self.wkv.multiply(x, acc), self.wgate.multiply(x, acc)], dim=1)
        name = raw_group(self.ratio)
        table = step.view.append(name, layer, raw)
        done = step.batch.finished(self.ratio)
        if not len(done.host_row):  # no group is finished
            return x.new_empty(0, table.shape[1] // 2)
        tokens = done.row.unsqueeze(1) * self.ratio + torch.arange(self.ratio, device=x.device)
        rows = table[step.view.locate(name, done.seq.unsqueeze(1), tokens)]  # [n, r, 2h]
        values, scores = rows.chunk(2, dim=2)
        return self.norm(kernels.pool_groups(values, scores).to(x.dtype))


class Indexer(nn.Module):
    """Scores compressed rows with many small heads against one key a row, and picks the best of them per token."""

    def __init__(self, c: TextConfig, layer: int, rounds: ActRound | None, rounding: bool):
        super().__init__()
        self.c, self.layer, self.rounding = c, layer, rounding
        self.owns_keys = layer in c.kv_source_layer_ids
        self.ratio = c.compress_ratios[layer]
        self.is_candidate_source = layer == c.candidate_source_layer_id
        self.scale = c.index_head_dim**-0.5 * c.index_n_heads**-0.5
        self.wq_b = Linear(c.index_n_heads * c.index_head_dim, c.q_lora_rank, rounds=rounds)
        self.weights_proj = Weight(c.index_n_heads, c.hidden_size)
        if self.owns_keys:
            self.wk = Weight(c.index_head_dim, c.head_dim)
            self.k_norm = RMSNorm(c.index_head_dim, c.rms_norm_eps)

    def keys(self, latent: Tensor, turns: Tensor) -> Tensor:
        """Index keys [n, index_head_dim] of latents [n, h] before rotation."""
        k = kernels.rotate_pairs(self.k_norm(self.wk.multiply(latent)), turns)
        return kernels.round_e2m1(k, 32, "e8m0") if self.rounding else k

    def queries(self, x: Tensor, qr: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, D], qr [T, q_lora_rank] -> queries [T, heads, width] and weights of the heads [T, heads]."""
        q = self.wq_b(qr).unflatten(-1, (self.c.index_n_heads, self.c.index_head_dim))
        q = kernels.rotate_pairs(q, turns)
        q = kernels.round_e2m1(q, 32, "e8m0") if self.rounding else q
        return q, self.weights_proj.multiply(x, kernels.accumulator(x.dtype)) * self.scale

    @torch.no_grad()
    def forward(self, x: Tensor, qr: Tensor, step: Step, share: LayerShare) -> tuple[Tensor, Tensor | None]:
        """x [T, D], qr [T, q_lora_rank] -> rows [T, k] of each token's sequence (-1 = none), and the candidate blocks
        for the layers after it."""
        batch = step.batch
        visible = torch.div(batch.positions + 1, self.ratio, rounding_mode="floor")
        longest = max((end // self.ratio for end in batch.ends), default=0)
        blocks = share.candidates
        if longest <= self.c.index_topk:  # everything visible is picked, and every block is a candidate
            rows = torch.arange(longest, device=x.device)
            return torch.where(rows < visible.unsqueeze(1), rows, -1), None
        q, weights = self.queries(x, qr, step.compressed_turns)
        assert share.keys is not None
        if blocks is None:
            return self._score_all(q, weights, visible, longest, step, share.keys)
        return self._score_candidates(q, weights, visible, step, share.keys, blocks), blocks

    def _score_all(
        self, q: Tensor, weights: Tensor, visible: Tensor, longest: int, step: Step, keys: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Score every row of each token's own sequence."""
        c, batch = self.c, step.batch
        # Under `deterministic` the way a row is scored must not depend on the longest sequence.
        fixed = kernels.is_deterministic()
        wants_blocks = self.is_candidate_source and (
            fixed or longest > c.candidate_topk_blocks * c.candidate_block_size
        )
        if len(batch.lengths) == 1 and not wants_blocks:  # nothing to put together
            scores = kernels.index_scores(q, weights, step.view.sequence(key_group(self.ratio), keys, 0))
            return kernels.top_rows(scores, c.index_topk, visible), None
        picked = q.new_full((len(batch), min(c.index_topk, longest)), -1, dtype=torch.int64)
        n_blocks = c.candidate_topk_blocks
        if not fixed:
            n_blocks = min(n_blocks, -(-longest // max(1, c.candidate_block_size)))
        blocks = picked.new_full((len(batch), n_blocks), -1) if wants_blocks else None
        for tokens, scores in self._scores(q, weights, step, keys):
            rows = kernels.top_rows(scores, c.index_topk, visible[tokens])
            picked[tokens, : rows.shape[1]] = rows
            if blocks is not None:
                kept = kernels.top_blocks(scores, c.candidate_topk_blocks, c.candidate_block_size, visible[tokens])
                blocks[tokens, : kept.shape[1]] = kept
        return picked, blocks

    def _scores(self, q: Tensor, weights: Tensor, step: Step, keys: Tensor) -> Iterator[tuple[slice | Tensor, Tensor]]:
        """Some tokens at a time, and their scores of their own sequence's rows."""
        batch, group = step.batch, key_group(self.ratio)
        if q.is_cuda and not any(batch.starts) and not kernels.is_deterministic():  # whole sequences, as in training
            each = [step.view.sequence(group, keys, b) for b in range(len(batch.lengths))]
            yield from kernels.index_scores_of_sequences(q, weights, each, batch.lengths)
            return
        for b, (start, end) in enumerate(zip(batch.offsets, batch.offsets[1:], strict=False)):
            if start < end:
                tokens = slice(start, end)
                yield tokens, kernels.index_scores(q[tokens], weights[tokens], step.view.sequence(group, keys, b))

    def _score_candidates(
        self, q: Tensor, weights: Tensor, visible: Tensor, step: Step, keys: Tensor, blocks: Tensor
    ) -> Tensor:
        """Score only the rows of candidate blocks: work is proportional to the candidates, not to the sequence.

        DIFF: with fewer visible candidate rows than index_topk, the released code fills up with rows that are no
        candidates; here they stay -1.
        """
        size = self.c.candidate_block_size
        rows = (blocks.unsqueeze(2) * size + torch.arange(size, device=q.device)).flatten(1)
        rows = torch.where((blocks < 0).repeat_interleave(size, dim=1) | (rows >= visible.unsqueeze(1)), -1, rows)
        index = step.view.locate(key_group(self.ratio), step.batch.seq.unsqueeze(1), rows)
        scores = kernels.index_scores_at(q, weights, keys, index)
        every = torch.full_like(visible, rows.shape[1])
        columns = kernels.top_rows(scores, self.c.index_topk, every)  # columns ascend with rows: ties to the lowest row
        return rows.gather(1, columns)


class Attention(nn.Module):
    """One layer's attention. `ratio` 0: window only. Sources own a compressor and/or an indexer."""

    def __init__(self, c: TextConfig, layer: int, rounds: ActRound | None, rounding: bool):
        super().__init__()
        self.c, self.layer, self.rounding = c, layer, rounding
        self.rounds_weights = rounding  # of attention, as the released kernel does where they multiply rows
        backbone = layer < c.num_hidden_layers
        self.ratio = c.compress_ratios[layer] if backbone else 0
        heads, h = c.num_attention_heads, c.head_dim
        acc = kernels.accumulator(torch.get_default_dtype())
        self.attn_sink = nn.Parameter(torch.empty(heads, dtype=acc))
        self.wq_a = Linear(c.q_lora_rank, c.hidden_size, rounds=rounds)
        self.q_norm = RMSNorm(c.q_lora_rank, c.rms_norm_eps)
        self.wq_b = Linear(heads * h, c.q_lora_rank, rounds=rounds)
        self.wkv = Linear(h, c.hidden_size, rounds=rounds)
        self.kv_norm = RMSNorm(h, c.rms_norm_eps)
        self.wo_a = GroupedLinear(c.o_groups, c.o_lora_rank, heads * h // c.o_groups)
        self.wo_b = Linear(c.hidden_size, c.o_groups * c.o_lora_rank, rounds=rounds)
        self.compressor = Compressor(c, self.ratio) if backbone and layer in c.kv_source_layer_ids else None
        self.indexer = Indexer(c, layer, rounds, rounding) if backbone and layer in c.index_source_layer_ids else None

    def queries(self, rounded: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
        """Rounded input [T, D] -> rotated queries [T, H, h] and the low-rank query [T, q_lora_rank] before `wq_b`."""
        qr = self.q_norm(self.wq_a.multiply(rounded))
        q = self.wq_b(qr).unflatten(-1, (self.c.num_attention_heads, self.c.head_dim))
        return kernels.rotate_pairs(q, turns), qr

    def window_rows(self, rounded: Tensor, turns: Tensor) -> Tensor:
        """Rounded input [T, D] -> rows [T, h] for the window, rotated and rounded as stored."""
        kv = kernels.rotate_pairs(self.kv_norm(self.wkv.multiply(rounded)), turns)
        return kernels.round_e4m3(kv, 32) if self.rounding else kv

    def attend(self, q: Tensor, scopes: list[tuple[Tensor, Tensor]], turns: Tensor, columns: Sequence[int]) -> Tensor:
        """Queries over scopes, rotated back and projected: [T, H, h] -> [T, D]. columns: place of each scope's first
        column in the released kernel's list (`kernels.sparse_attention`)."""
        released = columns if self.rounds_weights else None
        o = kernels.sparse_attention(q, scopes, self.attn_sink, self.c.head_dim**-0.5, released_columns=released)
        o = kernels.rotate_pairs(o, turns, inverse=True)
        return self.wo_b(self.wo_a(o.view(len(o), self.c.o_groups, self.wo_a.width)).flatten(1))

    def forward(
        self, x: Tensor, step: Step, share: LayerShare, narrowed: Narrowed | None = None
    ) -> tuple[Tensor, LayerShare]:
        """x [T, D] -> [T, D], and the share for the layers above. With `narrowed`, every token leaves its rows but only
        the kept ones ask: [T', D]."""
        turns = step.compressed_turns if self.ratio else step.window_turns
        rounded = self.wq_a.round(x)
        window = step.view.append("window", self.layer, self.window_rows(rounded, turns))
        if self.compressor is not None:
            share = self.publish(x, step, share)
        if narrowed is not None:
            x, rounded, turns = x[narrowed.kept], rounded[narrowed.kept], turns[narrowed.kept]
            step, share = narrowed.step, narrowed.share(share)
            if not len(x):  # nothing asks: the rows were all that was needed
                return x, share
        q, qr = self.queries(rounded, turns)
        scopes = [(window, step.view.window("window"))]
        # DIFF: the released prefill lists the window of an early token from its left end, the released decode from its
        # right end. Here it is always the latter, so that weights round alike however a sequence is cut.
        columns = [self.c.sliding_window - scopes[0][1].shape[1]]
        if self.ratio:
            share = self.select(x, qr, step, share)
            assert share.compressed is not None and share.selected is not None
            scopes.append((share.compressed, share.selected))
            if self.indexer is not None:
                term = f"layer{self.layer}.indexer_kl"
                step.batch.tape.keep(term, lambda: self.indexer_kl(x, q, qr, scopes, step, share))
            columns.append(self.c.sliding_window)
        return self.attend(q, scopes, turns, columns), share

    def indexer_kl(
        self, x: Tensor, q: Tensor, qr: Tensor, scopes: list[tuple[Tensor, Tensor]], step: Step, share: LayerShare
    ) -> Tensor:
        """How far an index source's scores are from the attention that its layer pays to the selected rows, for
        training: a scalar. Only the indexer's weights get a gradient from it.

        The teacher is the layer's own softmax over window, selected rows and sink, summed over heads, and normalised
        once over the selected rows (which are visible ones and, after a candidate source, of its blocks).
        """
        assert self.indexer is not None and share.keys is not None and share.rows is not None
        chosen = torch.arange(len(q), device=q.device) if step.batch.tape.queries is None else step.batch.tape.queries
        scopes = [(rows, index[chosen]) for rows, index in scopes]
        mass = kernels.attention_mass(q[chosen], scopes, self.attn_sink, self.c.head_dim**-0.5)[1]
        asking, weights = self.indexer.queries(x.detach()[chosen], qr.detach()[chosen], step.compressed_turns[chosen])
        seq = step.batch.seq[chosen].unsqueeze(1)
        index = step.view.locate(key_group(self.ratio), seq, share.rows[chosen])
        return selection_kl(kernels.index_scores_at(asking, weights, share.keys, index), mass, index)

    def publish(self, x: Tensor, step: Step, share: LayerShare) -> LayerShare:
        """A KV source's compressed rows and index keys: an owner always hands on its own, also on a step that finishes
        no group."""
        assert self.compressor is not None
        latent = self.compressor(x, step, self.layer)
        turns = step.group_turns(self.ratio)
        if self.indexer is not None:
            keys = step.view.append(key_group(self.ratio), self.layer, self.indexer.keys(latent.detach(), turns))
            share = replace(share, keys=keys)
        row = kernels.rotate_pairs(latent, turns)
        row = kernels.round_e2m1(row, 16, "e4m3") if self.rounding else row
        table = step.view.append(compressed_group(self.ratio), self.layer, row)
        return replace(share, compressed=table, candidates=None)

    def select(self, x: Tensor, qr: Tensor, step: Step, share: LayerShare) -> LayerShare:
        """An index source's selection; other layers keep the one they were handed."""
        view, name = step.view, f"layer{self.layer}.selected"
        if self.indexer is not None:
            found: list[Tensor | None] = [share.candidates]

            def pick() -> Tensor:
                assert self.indexer is not None
                rows, found[0] = self.indexer(x, qr, step, share)
                return rows

            rows = step.batch.tape.choose(name, pick)
            if kernels.is_deterministic():  # a width that does not depend on the longest sequence
                rows = nn.functional.pad(rows, (0, self.c.index_topk - rows.shape[1]), value=-1)
            selected = view.locate(compressed_group(self.ratio), step.batch.seq.unsqueeze(1), rows)
            share = replace(share, rows=rows, selected=selected, candidates=found[0])
        elif step.batch.tape.record:
            step.batch.tape.choose(name, lambda: share.rows)
        return share
