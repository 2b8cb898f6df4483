"""`LLM`: load a checkpoint, generate, score."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finback import kernels
from finback.base.runtime import ConfigError, RequestError, nearest
from finback.engine.request import Delta, RequestOutput, SamplingParams, SequenceState
from finback.engine.runner import Runner, replay_slice
from finback.engine.running import Running
from finback.engine.scoring import Collector, check_splits
from finback.io.checkpoint import Checkpoint
from finback.io.images import validate_images
from finback.io.load import load_model
from finback.io.text import Tokenizer
from finback.nn.tape import Tape, Trace

PREFILLS = ("exact_tail", "full", "window_tail")
FORWARD_TOKENS = 2048  # most tokens of one forward


class LLM:
    """A model ready to use.

    model: a checkpoint folder (config.json and safetensors in the released layout) or a hub id. device: "cpu",
    "cuda", ... dtype: "float64", "float32", "bfloat16"; None follows the checkpoint. rounding: "released" rounds
    activations and stored rows as the released kernels do, "off" rounds nothing; None = "released" for a quantised
    checkpoint. backend: "auto" or "torch". progress: called with (bytes done, bytes in all) while loading.

    Raises ConfigError, CheckpointError (before weights are allocated), KernelUnavailable.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        device: str = "cpu",
        dtype: str | None = None,
        rounding: str | None = None,
        backend: str = "auto",
        prefill: str = "exact_tail",
        draft: str | None = "auto",
        tensor_parallel_size: int = 1,
        progress: Callable[[int, int], None] | None = None,
    ):
        self.backend = kernels.check_backend(backend)
        if prefill not in PREFILLS:
            raise ConfigError(f"prefill {prefill!r}{nearest(prefill, PREFILLS)}; use one of {', '.join(PREFILLS)}")
        if tensor_parallel_size != 1:
            raise ConfigError(f"tensor_parallel_size {tensor_parallel_size}: this build runs on one device; use 1")
        self.prefill, self.draft = prefill, draft
        checkpoint = Checkpoint.open(model)
        self.model = load_model(
            checkpoint, device=check_device(device), dtype=dtype, rounding=rounding, progress=progress
        )
        self.config = checkpoint.config
        has_tokenizer = (checkpoint.path / "tokenizer.json").is_file()
        self.tokenizer = Tokenizer.load(checkpoint.path) if has_tokenizer else None

    # -- scoring ---------------------------------------------------------------------------------------------------

    def score(
        self,
        token_ids: Sequence[int] | Sequence[Sequence[int]],
        splits: Sequence[int] | Sequence[Sequence[int]] | None = None,
        images: Sequence[Any] | None = None,
        replay: Mapping[str, Any] | None = None,
        trace: bool = False,
    ) -> Any:
        """Logits [n, V] float32 (float64 models: float64) of every position of one sequence, or a list of them.

        token_ids: one list of ids, or a list of lists; then everything below is a list too, and a list is returned.
        splits: lengths of the chunks that the sequence is fed in, e.g. [7, 1, 1, 40]; 0 waits a step. None: at once.
        images: (start, patches [m, 3, p, p], grid_h, grid_w) per image, start = index of the first token of its span.
        replay: discrete choices to use instead of the model's own: "layerI.selected" [n, k] (rows of the compressed
        cache, -1 = none) and "layerI.experts" [n, K]; for several sequences name -> list. trace: return (logits,
        Trace).

        The result does not depend on `splits` nor on which sequences are scored together. Raises RequestError.
        """
        single = not len(token_ids) or not isinstance(token_ids[0], Sequence | Tensor)
        sequences = [[int(i) for i in s] for s in ([token_ids] if single else token_ids)]  # type: ignore[union-attr]
        wrap = (lambda value: [value]) if single else list
        picture_lists = wrap(images) if images is not None else [None] * len(sequences)
        states = [self._state(ids, pics) for ids, pics in zip(sequences, picture_lists, strict=True)]
        for state in states:
            self.check_length(len(state.tokens), "the sequence")
        steps = check_splits(
            wrap(splits) if splits is not None else None, [len(s.tokens) for s in states], FORWARD_TOKENS
        )
        fixed = {name: [torch.as_tensor(t) for t in wrap(value)] for name, value in (replay or {}).items()}
        self._check_replay(fixed, [len(s.tokens) for s in states])
        logits, traces = self._score(states, steps, fixed, trace)
        if single:
            return (logits[0], traces[0]) if trace else logits[0]
        return (logits, traces) if trace else logits

    def _score(
        self, states: list[SequenceState], steps: list[list[int]], replay: dict[str, list[Tensor]], trace: bool
    ) -> tuple[list[Tensor], list[Trace]]:
        lengths = [len(s.tokens) for s in states]
        chunk = max((n for step in steps for n in step), default=1)
        runner = Runner(self.model, lengths, chunk, backend=self.backend)
        slots = [runner.open(state) for state in states]
        collector = Collector(len(states))
        for step in steps:
            starts = [s.computed for s in states]
            work = list(zip(slots, step, strict=True))
            parts = [(i, a, a + n) for i, (a, n) in enumerate(zip(starts, step, strict=True))]
            tape = Tape(replay_slice(replay, parts) if replay else None, trace=trace)
            hidden = runner.forward(work, tape)
            logits = runner.logits(hidden)
            runner.check_finite(logits, work, "score")
            collector.add(step, logits, tape.seen)
        return collector.logits(), collector.traces()

    def _check_replay(self, replay: Mapping[str, list[Tensor]], lengths: list[int]) -> None:
        names = self.model.choice_names()
        for name, tensors in replay.items():
            if name not in names:
                raise RequestError(f"replay has {name!r}{nearest(name, names)}; this model decides {', '.join(names)}")
            for tensor, n in zip(tensors, lengths, strict=True):
                if tensor.ndim != 2 or len(tensor) != n:
                    raise RequestError(
                        f"replay {name!r} has shape {tuple(tensor.shape)}; it needs one line per token: [{n}, k]"
                    )

    # -- generation ------------------------------------------------------------------------------------------------

    def generate(
        self, prompts: Any, sampling: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Continue prompts. One prompt: a string, a list of token ids, or {"prompt_token_ids": [...], "images": [...]};
        or a list of such. sampling: one for all, or one a prompt. Returns one output a prompt, in order.

        A string is encoded as plain text (no control tokens) after the beginning-of-sequence token.
        """
        running = self._start(prompts, sampling)
        for _ in self._steps(running):
            pass
        return [r.output for r in running]

    def stream(self, prompt: Any, sampling: SamplingParams | None = None) -> Iterator[Delta]:
        """Continue one prompt, token by token. The deltas' texts and ids add up to what `generate` returns."""
        running = self._start([prompt], sampling)
        for _, delta in self._steps(running):
            yield delta

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text as `generate` feeds it: the beginning-of-sequence token where the tokenizer has one,
        then the text without control tokens. Raises RequestError for a checkpoint without tokenizer."""
        if self.tokenizer is None:
            raise RequestError("this checkpoint has no tokenizer.json: give token ids instead of text")
        return self.tokenizer.encode(text, add_bos=self.tokenizer.bos_id is not None)

    def _start(self, prompts: Any, sampling: SamplingParams | Sequence[SamplingParams] | None) -> list[Running]:
        if isinstance(prompts, str | Mapping) or (len(prompts) and isinstance(prompts[0], int)):
            prompts = [prompts]
        params = [sampling or SamplingParams()] * len(prompts) if not isinstance(sampling, Sequence) else list(sampling)
        if len(params) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts but {len(params)} SamplingParams; give one for all or one each")
        running = []
        for prompt, p in zip(prompts, params, strict=True):
            state = self._prompt(prompt)
            self.check_length(len(state.tokens) + 1, "the prompt and one new token")
            running.append(Running(state, p, self.tokenizer, self.model.max_positions))
        return running

    def _prompt(self, prompt: Any) -> SequenceState:
        images = None
        if isinstance(prompt, Mapping):
            if unknown := set(prompt) - {"prompt_token_ids", "prompt", "images"}:
                raise RequestError(
                    f"a prompt has the unknown keys {sorted(unknown)}; use prompt or prompt_token_ids, and images"
                )
            images = prompt.get("images")
            prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
        if isinstance(prompt, str):
            prompt = self.encode(prompt)
        if not isinstance(prompt, Sequence | Tensor):
            raise RequestError(
                f"a prompt is {type(prompt).__name__}; give a string, token ids or {{'prompt_token_ids': [...]}}"
            )
        return self._state([int(i) for i in prompt], images)

    def _steps(self, running: list[Running]) -> Iterator[tuple[int, Delta]]:
        """Run until every request has finished: each step prefills chunks and decodes together."""
        lengths = [r.longest for r in running]
        runner = Runner(self.model, lengths, min(FORWARD_TOKENS, max(lengths, default=1)), backend=self.backend)
        slots = [runner.open(r.state) for r in running]
        active = list(range(len(running)))
        while active:
            work, budget = [], FORWARD_TOKENS
            for i in active:
                n = min(len(running[i].state.tokens) - running[i].state.computed, budget)
                if n:
                    work.append((i, n))
                    budget -= n
            forwarded = [(slots[i], n) for i, n in work]
            hidden = runner.forward(forwarded)
            ends = torch.tensor([n for _, n in work]).cumsum(0) - 1
            logits = runner.logits(hidden[ends.to(hidden.device)])
            runner.check_finite(logits, forwarded, "generate")
            for (i, _), line in zip(work, logits, strict=True):
                if running[i].state.computed == len(running[i].state.tokens):
                    yield i, running[i].advance(line)
                    if running[i].output.finish_reason is not None:
                        runner.close(slots[i])
                        active.remove(i)

    # -- shared ----------------------------------------------------------------------------------------------------

    def _state(self, ids: list[int], images: Sequence[Any] | None) -> SequenceState:
        """Check ids and images of one sequence."""
        if not ids:
            raise RequestError("there are no tokens; give at least one")
        bad = next(((at, i) for at, i in enumerate(ids) if not 0 <= i < self.model.vocab_size), None)
        if bad is not None:
            raise RequestError(
                f"token id {bad[1]} at position {bad[0]} is outside the vocabulary: 0..{self.model.vocab_size - 1}"
            )
        if not images:
            return SequenceState(ids)
        facts = self.model.image_facts()
        if facts is None:
            raise RequestError("this model takes no images (its config has no vision_config)")
        types, checked = validate_images(images, len(ids), token_ids=ids, **facts)
        return SequenceState(ids, types, checked)

    def check_length(self, length: int, what: str) -> None:
        """RequestError when `length` tokens are more than the model has positions."""
        if length > self.model.max_positions:
            raise RequestError(f"{what}: {length} tokens, but the model has {self.model.max_positions} positions")


def check_device(name: str) -> torch.device:
    """The torch device of that name if this machine has it, else ConfigError."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device {name!r} is no device name; use 'cpu' or 'cuda'") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} was asked for, but torch finds no CUDA GPU here; use device='cpu'")
    return device
