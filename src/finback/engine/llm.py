"""`LLM`: load a checkpoint, generate, score."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finback import kernels
from finback.base.runtime import ConfigError, RequestError, nearest
from finback.engine.args import EngineArgs
from finback.engine.core import Engine
from finback.engine.request import Delta, RequestOutput, SamplingParams, SequenceState, SpeculativeConfig, check_text
from finback.engine.runner import Runner, replay_slice
from finback.engine.running import Running
from finback.engine.scoring import Collector, check_splits
from finback.engine.stats import Stats
from finback.io.checkpoint import Checkpoint
from finback.io.default import default_model
from finback.io.images import validate_images
from finback.io.load import load_model
from finback.io.text import Tokenizer
from finback.nn.tape import Tape, Trace

FORWARD_TOKENS = 2048  # most tokens of one forward of `score`


class LLM:
    """A model ready to use.

    model: a checkpoint folder (config.json and safetensors in the released layout) or a hub id; None = the small
    trained model of the package finback-mini. device: "cpu", "cuda", ... dtype: "float64", "float32", "bfloat16";
    None follows the checkpoint. rounding: "released" rounds activations and stored rows as the released kernels do,
    "off" rounds nothing; None = "released" for a quantised checkpoint. backend: "auto" or "torch". progress: called
    with (bytes done, bytes in all) while loading.

    draft: "auto" speculates with the model's own draft layers where it has some, "ngram" with repetitions in the text
    (any model), "model" insists on draft layers, None not at all; or a `SpeculativeConfig`. limits: the fields
    of `EngineArgs` (max_num_seqs, max_model_len, kv_cache_memory_bytes, enable_prefix_caching, deterministic, ...).

    Raises ConfigError, CheckpointError (before weights are allocated), KernelUnavailable.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        device: str = "cpu",
        dtype: str | None = None,
        rounding: str | None = None,
        backend: str = "auto",
        prefill: str = "exact_tail",
        draft: str | SpeculativeConfig | None = "auto",
        tensor_parallel_size: int = 1,
        progress: Callable[[int, int], None] | None = None,
        **limits: Any,
    ):
        self.backend = kernels.check_backend(backend)
        names = EngineArgs.__dataclass_fields__
        if unknown := next((name for name in limits if name not in names), None):
            raise ConfigError(f"LLM has no option {unknown!r}{nearest(unknown, names)}; see EngineArgs for its limits")
        speculative = SpeculativeConfig(method=draft) if isinstance(draft, str) else draft
        self.args = EngineArgs(prefill=prefill, backend=backend, speculative=speculative, **limits)
        if tensor_parallel_size != 1:
            raise ConfigError(f"tensor_parallel_size {tensor_parallel_size}: this build runs on one device; use 1")
        self.prefill, self.draft = prefill, draft
        checkpoint = Checkpoint.open(default_model() if model is None else model)
        self.model = load_model(
            checkpoint, device=check_device(device), dtype=dtype, rounding=rounding, progress=progress
        )
        self.model.window_tail = prefill == "window_tail"
        self.config = checkpoint.config
        has_tokenizer = (checkpoint.path / "tokenizer.json").is_file()
        self.tokenizer = Tokenizer.load(checkpoint.path) if has_tokenizer else None

    @cached_property
    def engine(self) -> Engine:
        """What runs the requests; it takes its memory when it is first used."""
        return Engine(self.model, self.tokenizer, self.args)

    @property
    def stats(self) -> Stats:
        """What the engine has done so far; `.summary()` gives it as plain numbers."""
        return self.engine.stats

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
        if isinstance(token_ids, Tensor):
            token_ids = token_ids.tolist()
        single = not len(token_ids) or not isinstance(token_ids[0], Sequence | Tensor)
        sequences = [token_list(s) for s in ([token_ids] if single else token_ids)]  # type: ignore[union-attr]
        wrap: Callable[[Any], list[Any]] = (lambda value: [value]) if single else list
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
        runner = Runner(self.model, lengths, chunk, backend=self.backend, deterministic=self.args.deterministic)
        if runner.one_by_one:
            steps = [[int(i == j) for j in range(len(states))] for i, n in enumerate(lengths) for _ in range(n)]
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

        A string is encoded as plain text (no control tokens) after the beginning-of-sequence token. A prompt whose
        computation fails (NonFiniteError) has `error` in its output and leaves the others alone; a single one raises.
        """
        running = self._start(prompts, sampling)
        try:
            while any(r.output.finish_reason is None for r in running):
                self.engine.step()
        finally:
            self._abandon(running)
        if len(running) == 1 and running[0].output.error is not None:
            raise running[0].output.error
        return [r.output for r in running]

    def stream(self, prompt: Any, sampling: SamplingParams | None = None) -> Iterator[Delta]:
        """Continue one prompt, token by token. The deltas' texts and ids add up to what `generate` returns. Closing the
        iterator gives the request up. Raises NonFiniteError after what came before it."""
        running = self._start([prompt], sampling)
        try:
            while True:
                while not running[0].deltas:
                    self.engine.step()
                delta = running[0].deltas.popleft()
                if delta.error is not None:
                    raise delta.error
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            self._abandon(running)

    def _abandon(self, running: Sequence[Running]) -> None:
        for r in running:
            self.engine.abort(r)

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text as `generate` feeds it: the beginning-of-sequence token where the tokenizer has one,
        then the text without control tokens. Raises RequestError for a checkpoint without tokenizer."""
        if self.tokenizer is None:
            raise RequestError("this checkpoint has no tokenizer.json: give token ids instead of text")
        check_text(text, "the prompt")
        return self.tokenizer.encode(text, add_bos=self.tokenizer.bos_id is not None)

    def _start(self, prompts: Any, sampling: SamplingParams | Sequence[SamplingParams] | None) -> list[Running]:
        if isinstance(prompts, Tensor):
            prompts = prompts.tolist()
        single = not isinstance(prompts, Sequence) or isinstance(prompts, str)
        if single or (prompts and isinstance(prompts[0], Integral)):
            prompts = [prompts]
        given = sampling if isinstance(sampling, Sequence) else [sampling] * len(prompts)
        params = [SamplingParams() if p is None else p for p in given]
        if wrong := next((p for p in params if not isinstance(p, SamplingParams)), None):
            raise RequestError(f"sampling is {wrong!r}; give SamplingParams, or a list with one for each prompt")
        if len(params) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts but {len(params)} SamplingParams; give one for all or one each")
        states = [self.prompt(prompt) for prompt in prompts]
        running: list[Running] = []
        try:
            running += (self.engine.add(state, p) for state, p in zip(states, params, strict=True))
        except BaseException:
            self._abandon(running)
            raise
        return running

    def prompt(self, prompt: Any) -> SequenceState:
        """A prompt in any of the forms of `generate`, checked. Raises RequestError."""
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
        if not isinstance(prompt, Sequence | Tensor) or isinstance(prompt, bytes | bytearray):
            raise RequestError(
                f"a prompt is {type(prompt).__name__}; give a string, token ids or {{'prompt_token_ids': [...]}}"
            )
        return self._state(token_list(prompt), images)

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
        if images is not None and not isinstance(images, Sequence):
            raise RequestError(f"images is {type(images).__name__}; give a list of (start, patches, grid_h, grid_w)")
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


def token_list(values: Iterable[Any]) -> list[int]:
    """Token ids of any integer type as Python ints. Raises RequestError for anything else; nothing is rounded."""
    ids = []
    for value in values:
        try:
            ids.append(operator.index(value))
        except TypeError:
            raise RequestError(f"a token id is {value!r} ({type(value).__name__}); ids are integers") from None
    return ids


def check_device(name: str) -> torch.device:
    """The torch device of that name if this machine has it, else ConfigError."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device {name!r} is no device name; use 'cpu' or 'cuda'") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} was asked for, but torch finds no CUDA GPU here; use device='cpu'")
    return device
