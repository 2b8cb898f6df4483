"""DSpark: draft stages that propose a block of tokens after each known one.

Let p be the last position the backbone has run, and the anchor its known next token (position p + 1).
1. `combine`: the streams that enter a few target layers, averaged over copies, concatenated and projected: main [T, D].
2. `observe`: each stage writes window rows made from `main` for every backbone token (`draft_window`). Rows of draft
   tokens are never stored.
3. `propose`: the block [anchor, noise, ...] stands at positions p + 1 ...; each stage attends, without a causal mask,
   to the window rows up to p and to the block's own rows. Slot i's logits are for position p + 2 + i.
4. Token by token, a Markov head adds a bias that depends on the token before; a confidence head estimates the chance
   that the draft is accepted, given that those before it are.

Source: the released reference's draft stages ("mtp.*" tensors); block positions start at p + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from finback import kernels
from finback.models.base import Proposal
from finback.models.deepseek_v41.config import DeepseekV41Config
from finback.nn.linear import ActRound, Embedding, Head, Linear
from finback.nn.norm_rope import RMSNorm, turns_at
from finback.nn.rows import ForwardBatch, RowView

if TYPE_CHECKING:
    from finback.models.deepseek_v41.model import Block, DeepseekV41

GROUP = "draft_window"


@dataclass(frozen=True)
class DraftBlock:
    """One pass of the stages over n sequences. hidden: [n, k, D]; base_logits: [n, k, V] before the Markov bias."""

    hidden: Tensor
    base_logits: Tensor


class DSpark(nn.Module):
    """The draft stages of a DeepSeek-V4.1."""

    def __init__(
        self,
        config: DeepseekV41Config,
        rounds: ActRound | None,
        rounding: bool,
        make_block: Callable[[int], Block],
    ):
        super().__init__()
        c = self.c = config.text_config
        self.block_size, self.rounding = c.dspark_block_size, rounding
        self.main_proj = Linear(c.hidden_size, len(c.dspark_target_layer_ids) * c.hidden_size, rounds=rounds)
        self.main_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.stages = nn.ModuleList(make_block(c.num_hidden_layers + i) for i in range(c.draft_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.markov_embed = Embedding(c.vocab_size, c.dspark_markov_rank)
        self.markov_head = Head(c.vocab_size, c.dspark_markov_rank)
        self.confidence = Head(1, c.hidden_size + c.dspark_markov_rank)

    def combine(self, targets: Sequence[Tensor]) -> Tensor:
        """Averaged streams [T, D] of each target layer -> main [T, D]."""
        return self.main_norm(self.main_proj(torch.cat(list(targets), dim=1)))

    def observe(self, main: Tensor, view: RowView, freqs: Tensor) -> None:
        """Store every stage's window rows for the tokens of a backbone forward. main: [T, D] from `combine`."""
        turns = turns_at(view.batch.positions, freqs, main.dtype)
        for stage in self.stages:
            attn = stage.attn
            view.append(GROUP, attn.layer, attn.window_rows(attn.wq_a.round(main), turns))

    def block_chunk(self, anchor: int) -> list[int]:
        """Token ids of one draft block."""
        return [anchor] + [self.c.dspark_noise_token_id] * (self.block_size - 1)

    def run(self, model: DeepseekV41, batch: ForwardBatch, view: RowView) -> DraftBlock:
        """One pass over blocks. `batch`: one chunk of `block_size` tokens a sequence, starting at p + 1."""
        shape = len(batch.chunks), self.block_size
        sequences = torch.arange(len(batch.chunks), device=batch.device)
        hidden = self.run_blocks(
            model, batch.ids.view(shape), batch.positions.view(shape), sequences, max(batch.starts, default=0), view
        )
        return DraftBlock(hidden, self.base_logits(model, hidden))

    def run_blocks(
        self, model: DeepseekV41, ids: Tensor, positions: Tensor, sequences: Tensor, reach: int, view: RowView
    ) -> Tensor:
        """The stages over any number of blocks, several of one sequence or none: hidden [n, k, D].

        ids, positions: [n, k] int64, of a block's tokens; it sees its sequence's rows before them. sequences: [n]
        int64, the sequence of `view` that each block belongs to. reach: a bound of the blocks' first positions.
        """
        n, k = ids.shape
        turns = turns_at(positions.flatten(), model.window_freqs, model.dtype)
        last = positions[:, :1] - 1  # [n, 1]: p of each block
        width = min(self.c.sliding_window, reach)
        # REF: in the order of a ring of `sliding_window` slots, as the released kernel's list has them.
        back = (last - torch.arange(width, device=last.device)) % self.c.sliding_window
        rows = (last - back).clamp(min=-1)
        past = view.locate(GROUP, sequences.unsqueeze(1), rows).repeat_interleave(k, dim=0)  # [n k, w]
        own = torch.arange(n * k, device=last.device).view(n, k).repeat_interleave(k, dim=0)  # [n k, k]
        streams = model.embed(ids.flatten()).unsqueeze(1).expand(-1, self.c.hc_mult, -1)
        pre = torch.zeros(n * k, self.c.hc_mult, dtype=kernels.accumulator(model.dtype), device=streams.device)
        pre[:, 0] = 1
        for stage in self.stages:
            attn = stage.attn
            wide, x = stage.enter(streams, pre)
            rounded = attn.wq_a.round(x)
            q, _ = attn.queries(rounded, turns)
            scopes = [(view.table(GROUP, attn.layer), past), (attn.window_rows(rounded, turns), own)]
            y = attn.attend(q, scopes, turns, (0, self.c.sliding_window))
            streams, pre = stage.leave(y, wide, view.batch, None)  # drafts are text: no image bias
        hidden = kernels.hc_collapse(streams.to(pre.dtype), pre).to(model.dtype)
        return hidden.view(n, k, -1)

    def base_logits(self, model: DeepseekV41, hidden: Tensor) -> Tensor:
        """hidden [..., D] of `run_blocks` -> logits [..., V] before the Markov bias, by the backbone's head."""
        return model.head(self.norm(hidden))

    def decide(
        self, block: DraftBlock, anchors: Tensor, choose: Callable[[Tensor, int], Tensor] | None = None
    ) -> tuple[Proposal, Tensor]:
        """Draft tokens one after another. anchors: [n] int64. choose(logits [n, V], i) -> [n] ids of slot i; None: the
        most likely one. Returns the proposal (confidence in (0, 1)) and the logits [n, k, V] with the Markov bias."""
        previous, tokens, logits, marks = anchors, [], [], []
        for i in range(self.block_size):
            mark = self.markov_embed(previous)
            line = block.base_logits[:, i] + self.markov_head(mark)
            previous = line.argmax(dim=1) if choose is None else choose(line, i)
            tokens.append(previous)
            logits.append(line)
            marks.append(mark)
        confidence = self.confidence_logits(block.hidden, torch.stack(marks, dim=1)).sigmoid()
        return Proposal(torch.stack(tokens, dim=1), confidence=confidence), torch.stack(logits, dim=1)

    def confidence_logits(self, hidden: Tensor, marks: Tensor) -> Tensor:
        """[n, k] logits of the confidence: hidden [n, k, D] of `run_blocks`, marks [n, k, r] of the tokens before."""
        return self.confidence(torch.cat([hidden, marks], dim=2)).squeeze(2)
