"""Runs that train draft stages: their objective, and the backbone that they must leave as it is."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from finback.base.runtime import CheckpointError, ConfigError
from finback.models.deepseek_v41.config import DeepseekV41Config, TextConfig
from finback.nn.rows import BatchRows
from finback.nn.tape import Tape
from finback.train.data import Batch
from finback.train.draft import Anchors, DraftConfig, Slots, compare, draw_anchors, eligible
from finback.train.loss import expert_counts
from finback.train.objective import Result
from finback.train.optim import Optimiser
from finback.train.recipe import Stage
from finback.train.state import weight_tensors

PREFIX = "mtp."  # of the draft stages' tensors, in the checkpoint and in the model
_CHUNK_ELEMENTS, _GPU_CHUNK_ELEMENTS = 1 << 22, 1 << 28  # logits of drafts that exist at once


@dataclass(frozen=True)
class Blocks:
    """hidden: [n, k, D] of the draft stages, with gradient. known: [n, k] int64, in each slot the true token before it.
    wanted: [n, k, D] of the backbone, where it knows that token too. tape: the draft routers' choices."""

    hidden: Tensor
    known: Tensor
    wanted: Tensor
    tape: Tape


class DraftObjective:
    """Computes the drafts' loss of batches, where `Objective` computes the model's. Only draft stages get gradients."""

    def __init__(self, model: Any, config: DraftConfig):
        assert model.mtp is not None, "the recipe was checked"
        self.model, self.drafts, self.config = model, model.mtp, config
        self.block: int = model.mtp.block_size
        self.rows = BatchRows(model.row_groups())
        self.routers = {f"layer{stage.layer}": stage.ffn.gate for stage in model.mtp.stages}
        self.device = next(model.parameters()).device

    def targets(self, batch: Batch) -> int:
        """How many anchors a forward of `batch` has."""
        return min(self.config.anchors, int(eligible(batch).sum()))

    def __call__(
        self, batch: Batch, stage: Stage, targets: int, forwards: int = 1, seed: Sequence[int] = (0,)
    ) -> Result:
        """One forward. targets: anchors of the whole step, by which the sum over anchors is divided. seed: of the draw
        of anchors. The result's `nats` is that sum, undivided, and its `targets` the anchors of this forward."""
        anchors = draw_anchors(batch, self.config.anchors, self.block, seed).to(self.device)
        if not len(anchors):
            nothing = self.drafts.norm.weight.sum() * 0
            return Result(nothing, nothing.detach(), 0, {}, {})
        slots, tape = self.slots(batch, anchors)
        sums = slots.sums(anchors, self.config)
        terms = {name: sums[name].detach() / len(anchors) for name in ("ce", "l1", "bce")}
        terms |= {name: sums[name] / sums["whole"].clamp(min=1) for name in ("accepted", "greedy")}
        total = sums["loss"]
        return Result(total / max(targets, 1), total.detach(), len(anchors), terms, self._counts(tape))

    def slots(self, batch: Batch, anchors: Anchors) -> tuple[Slots, Tape]:
        """What the loss is made of, for anchors on the model's device, and the choices of the draft routers."""
        blocks = self.blocks(batch, anchors)
        chunks, parts = list(self._chunks(len(anchors))), []
        for c in chunks:
            given = blocks.hidden[c], blocks.known[c], blocks.wanted[c], anchors.labels[c]
            if len(chunks) == 1 or not torch.is_grad_enabled():
                parts.append(self._compare(*given))
            else:  # logits are made again in the backward pass
                parts.append(checkpoint(self._compare, *given, use_reentrant=False, preserve_rng_state=False))
        return Slots(*(torch.cat(part) for part in zip(*parts, strict=True))), blocks.tape

    def blocks(self, batch: Batch, anchors: Anchors) -> Blocks:
        """The forward of the backbone, and that of the draft stages."""
        model, drafts = self.model, self.drafts
        with torch.no_grad():
            packed = batch.forward_batch(self.device, model=model)
            view = self.rows.view(packed)
            backbone = model.backbone(packed, view)
        packed.tape = Tape(record=True)
        drafts.observe(drafts.combine(backbone.targets), view, model.window_freqs)
        known = packed.ids[anchors.places]
        ids = torch.full_like(known, drafts.c.dspark_noise_token_id)
        ids[:, 0] = known[:, 0]
        first = anchors.places[:, 0]
        positions = packed.positions[first].unsqueeze(1) + torch.arange(self.block, device=self.device)
        hidden = drafts.run_blocks(model, ids, positions, packed.seq[first], max(packed.lengths), view)
        return Blocks(hidden, known, backbone.hidden[anchors.places], packed.tape)

    def _chunks(self, anchors: int) -> Iterator[slice]:
        """Runs of anchors whose logits may exist at once."""
        room = _GPU_CHUNK_ELEMENTS if self.device.type == "cuda" else _CHUNK_ELEMENTS
        size = max(1, room // (self.block * self.model.vocab_size))
        return (slice(at, min(at + size, anchors)) for at in range(0, anchors, size))

    def _compare(self, hidden: Tensor, known: Tensor, wanted: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """Of `Blocks` and `Anchors`, or a run of them, the fields of `Slots`."""
        drafts = self.drafts
        marks = drafts.markov_embed(known)
        logits = drafts.base_logits(self.model, hidden) + drafts.markov_head(marks)
        with torch.no_grad():
            target = self.model.logits(wanted)
        return compare(logits, target, labels, drafts.confidence_logits(hidden, marks))

    def _counts(self, tape: Tape) -> dict[str, Tensor]:
        return {
            name: expert_counts(tape.seen[f"{name}.experts"], router.weight.shape[0], None)
            for name, router in self.routers.items()
        }

    @torch.no_grad()
    def held_out(self, sources: Iterable[tuple[str, Iterable[Batch]]]) -> dict[str, dict[str, float]]:
        """By quantity, then by source: "held_out", the mean loss of an anchor; "accepted" and "greedy", the mean number
        of accepted drafts of a block (`Slots.sums`). Sources without a whole block are left out."""
        out: dict[str, dict[str, float]] = {"held_out": {}, "accepted": {}, "greedy": {}}
        for source, batches in sources:
            sums: dict[str, Tensor] = {}
            count = 0
            for i, batch in enumerate(batches):
                anchors = draw_anchors(batch, self.config.anchors, self.block, (i,)).to(self.device)
                if len(anchors):
                    found = self.slots(batch, anchors)[0].sums(anchors, self.config)
                    sums = {name: value + sums.get(name, 0) for name, value in found.items()}
                    count += len(anchors)
            if sums and (whole := float(sums["whole"])):
                out["held_out"][source] = float(sums["loss"]) / count
                out |= {name: {**out[name], source: float(sums[name]) / whole} for name in ("accepted", "greedy")}
        return out


class Frozen:
    """The backbone of a draft run: nothing of it gets a gradient from here on, and `check` compares its bytes with
    those of now. The optimiser keeps its float32 masters, so that checkpoints hold them as they were loaded."""

    def __init__(self, model: Any, optimiser: Optimiser):
        for name, parameter in model.named_parameters():
            if not name.startswith(PREFIX):
                parameter.requires_grad_(False)
        model.eval()
        self.digest = digest(weight_tensors(model, optimiser.masters()))

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise CheckpointError where tensors about to be written have another backbone."""
        if (now := digest(tensors)) != self.digest:
            raise CheckpointError(
                f"the backbone changed while drafts were trained (sha256 {self.digest[:12]} -> {now[:12]}), and "
                f"nothing is written. That is a fault of finback's, please report it; the last checkpoint is good"
            )


def digest(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over the names and bytes of all tensors of the released layout but the draft stages'."""
    found = hashlib.sha256()
    for name in sorted(name for name in tensors if not name.startswith(PREFIX)):
        found.update(name.encode())
        found.update(tensors[name].detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def check_backbone(given: Mapping[str, Any], config: Mapping[str, Any], where: Path) -> None:
    """ConfigError unless `config` of a draft run is that of the backbone in `where` (`given`, its config.json) but for
    the draft stages."""
    backbone = DeepseekV41Config.from_dict(given)
    if backbone.quantization_config is not None:
        raise ConfigError(f"init_from {where} is quantised; drafts are trained on the plain weights it was made from")
    asked = DeepseekV41Config.from_dict(config)
    pairs = [(f"text_config.{name}", one, two) for name, one, two in _facts(backbone.text_config, asked.text_config)]
    pairs += [(name, getattr(backbone, name), getattr(asked, name)) for name in ("vision_config", "image_token_id")]
    for name, one, two in pairs:
        if one != two:
            raise ConfigError(f"{name} is {one} in {where}, but {two} in the recipe; drafts need the backbone's own")


def _facts(one: TextConfig, two: TextConfig) -> Iterator[tuple[str, Any, Any]]:
    """Name and both values of whatever decides what a backbone computes."""
    layers = one.num_hidden_layers
    for name in (f.name for f in fields(one)):
        if name == "compress_ratios":
            yield name, one.compress_ratios[:layers], two.compress_ratios[:layers]
        elif name != "num_nextn_predict_layers" and not name.startswith("dspark_"):
            yield name, getattr(one, name), getattr(two, name)
