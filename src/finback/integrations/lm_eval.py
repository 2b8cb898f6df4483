"""finback models in EleutherAI's lm-evaluation-harness, registered there as "finback".

    from finback.integrations.lm_eval import evaluate
    evaluate(LLM(folder), ["lambada_openai", "hellaswag"])

Texts are encoded without control tokens after the beginning-of-sequence token, as `LLM.generate` does it. What is too
long loses its beginning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import lm_eval
import torch
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from finback.base.runtime import RequestError
from finback.engine.llm import LLM
from finback.engine.request import SamplingParams

_BATCH_TOKENS = 8192  # tokens that are scored together
_ANSWER_TOKENS = 256  # of a task that does not say how many


@register_model("finback")
class FinbackLM(LM):
    """pretrained: an `LLM`, or what it takes as model; options: its keywords. Raises RequestError without a tokenizer.

    Requests are the harness's: objects whose `args` hold what each method describes.
    """

    def __init__(self, pretrained: Any, **options: Any):
        super().__init__()
        self.llm = pretrained if isinstance(pretrained, LLM) else LLM(pretrained, **_known(options))
        if self.llm.tokenizer is None:
            raise RequestError("this checkpoint has no tokenizer.json, and the harness gives texts")
        self._tokenizer = self.llm.tokenizer
        self._start = [i for i in (self._tokenizer.bos_id, *self._tokenizer.eos_ids) if i is not None][:1]

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(context, continuation) -> log probability of the continuation in nats, and whether it is what greedy
        decoding gives."""
        return self._score([self._pair(*request.args) for request in requests])

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """(text,) -> log probability of the whole text in nats. A text longer than the model is cut into parts of half
        that length, each of which sees the part before it."""
        parts, owners = [], []
        for i, request in enumerate(requests):
            for part in self._parts(self._tokenizer.encode(request.args[0])):
                parts.append(part)
                owners.append(i)
        totals = [0.0] * len(requests)
        for i, (value, _) in zip(owners, self._score(parts), strict=True):
            totals[i] += value
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """(context, settings) -> text up to the first of settings["until"]; settings in the words of Hugging Face:
        max_gen_toks, do_sample, temperature, top_p, top_k."""
        sampling = [self._sampling(request.args[1]) for request in requests]
        prompts = []
        for request, params in zip(requests, sampling, strict=True):
            room = max(1, self.llm.engine.max_model_len - params.max_tokens - len(self._start))
            prompts.append([*self._start, *self._tokenizer.encode(request.args[0])[-room:]])
        return [output.text for output in self.llm.generate(prompts, sampling)] if prompts else []

    def _sampling(self, given: dict[str, Any]) -> SamplingParams:
        until = given.get("until") or []
        drawn = given.get("do_sample", given.get("temperature", 0) > 0)
        most = int(given.get("max_gen_toks", given.get("max_new_tokens", _ANSWER_TOKENS)))
        return SamplingParams(
            max_tokens=max(1, min(most, self.llm.engine.max_model_len // 2)),  # some of the context has to stay
            stop=[until] if isinstance(until, str) else [text for text in until if text],
            temperature=float(given.get("temperature", 1.0)) if drawn else 0.0,
            top_p=float(given.get("top_p", 1.0)),
            top_k=int(given.get("top_k", 0)),
        )

    def _pair(self, context: str, continuation: str) -> tuple[list[int], int]:
        """Ids of both, and how many of them are the continuation's. Blanks between the two belong to the continuation,
        whose first token may hold them."""
        blanks = len(context) - len(context.rstrip())
        if blanks:
            context, continuation = context[:-blanks], context[-blanks:] + continuation
        before = self._tokenizer.encode(context)
        ids = self._tokenizer.encode(context + continuation)
        if ids[: len(before)] != before:  # the two grow together where they meet
            ids = before + self._tokenizer.encode(continuation)
        return [*self._start, *ids], len(ids) - len(before)

    def _parts(self, ids: list[int]) -> Iterator[tuple[list[int], int]]:
        most = self.llm.model.max_positions
        if len(ids) + len(self._start) <= most:
            yield [*self._start, *ids], len(ids)
            return
        half = most // 2
        for at in range(0, len(ids), half):
            before = ids[at - half : at] if at else self._start
            yield [*before, *ids[at : at + half]], len(ids[at : at + half])

    def _score(self, lines: Sequence[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        """(ids, n) -> log probability of the last n ids, and whether each is the likeliest. Several at a time."""
        found: list[tuple[float, bool]] = [(0.0, True)] * len(lines)
        for group in self._groups(lines):
            texts = [lines[i][0][-self.llm.model.max_positions :] for i in group]
            for i, ids, logits in zip(group, texts, self.llm.score(texts), strict=True):
                n = min(lines[i][1], len(ids) - 1)
                if n < 1:
                    continue
                wanted = torch.tensor(ids[-n:], device=logits.device)
                tail = logits[-n - 1 : -1]
                chosen = tail.double().log_softmax(dim=1).gather(1, wanted.unsqueeze(1))
                found[i] = float(chosen.sum()), bool((tail.argmax(dim=1) == wanted).all())
        return found

    def _groups(self, lines: Sequence[tuple[list[int], int]]) -> Iterator[list[int]]:
        """Numbers of lines that are scored together, the longest first."""
        group: list[int] = []
        size = 0
        for i in sorted(range(len(lines)), key=lambda i: -len(lines[i][0])):
            if group and size + len(lines[i][0]) > _BATCH_TOKENS:
                yield group
                group, size = [], 0
            group.append(i)
            size += len(lines[i][0])
        if group:
            yield group


def _known(options: dict[str, Any]) -> dict[str, Any]:
    """The harness adds its own batch settings to a model's keywords; batches are made here."""
    return {k: v for k, v in options.items() if k not in ("batch_size", "max_batch_size")}


def evaluate(
    llm: LLM, tasks: Sequence[str], *, limit: int | None = None, num_fewshot: int | None = None
) -> dict[str, Any]:
    """Metrics by task of the harness, as it reports them. limit: examples of each task. The harness fetches the data of
    most tasks itself."""
    found = lm_eval.simple_evaluate(model=FinbackLM(llm), tasks=list(tasks), limit=limit, num_fewshot=num_fewshot)
    return dict(found["results"])
