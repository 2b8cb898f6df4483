"""The command `finback`: verbs over the Python surface.

A verb is a dataclass: its fields are the flags, their docstrings the help, `run` the work. Flags use vLLM's words where
the meaning is the same. Everything heavy is imported inside the verbs, so that help and mistakes are answered at once.

Results go to stdout, progress and errors to stderr. Exit codes: 0, 2 for anything the user can mend (one line; set
FINBACK_TRACEBACK=1 for the traceback), 130 after Ctrl-C, 141 when the reader of stdout is gone.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from tyro.conf import FlagCreatePairsOff, OmitSubcommandPrefixes, Positional, UseAppendAction, arg, subcommand

from finback import __version__
from finback.base.runtime import ConfigError, FinbackError, RequestError

if TYPE_CHECKING:
    from finback.engine.llm import LLM

STDIN = "-"


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """Which model to load, and how. The defaults follow the checkpoint."""

    model: str = ""
    """Folder of the checkpoint (config.json and safetensors), or a hub id. Default: the model of finback-mini."""
    device: str = "cpu"
    """Where the model runs: cpu, cuda, cuda:1, ..."""
    dtype: Literal["auto", "float64", "float32", "bfloat16"] = "auto"
    """Precision of the arithmetic."""
    rounding: Literal["auto", "released", "off"] = "auto"
    """Round activations as the released kernels do, or not at all. auto: released for a quantised checkpoint."""
    backend: Literal["auto", "torch", "triton"] = "auto"
    """Kernels to use."""

    def load(self, **options: Any) -> LLM:
        """Load the model with these flags and `options`, with a bar on stderr if a person is watching."""
        with _progress_bar(f"loading {self.model or 'finback-mini'}") as progress:
            from finback.engine.llm import LLM

            return LLM(
                self.model or None,
                device=self.device,
                dtype=None if self.dtype == "auto" else self.dtype,
                rounding=None if self.rounding == "auto" else self.rounding,
                backend=self.backend,
                progress=progress,
                **options,
            )


@dataclass(frozen=True, kw_only=True)
class Generate(ModelFlags):
    """Continue a prompt. Text is printed as it comes."""

    prompt: Annotated[Positional[str], arg(metavar="[PROMPT]")] = STDIN
    """The text to continue; "-" reads it from stdin."""
    token_ids: str = ""
    """The prompt as comma-separated token ids instead of text, e.g. 1,2,3."""
    max_tokens: int = 64
    """Stop after this many new tokens."""
    temperature: float = 0.0
    """0 takes the likeliest token every time."""
    top_p: float = 1.0
    """Sample among the likeliest tokens whose probabilities add up to this; 1 keeps all."""
    top_k: int = 0
    """Sample among this many likeliest tokens; 0 keeps all."""
    seed: int | None = None
    """The same seed gives the same text."""
    prefill: Literal["exact_tail", "full", "window_tail"] = "exact_tail"
    """Prompt positions that upper layers compute. exact_tail equals full; window_tail is cheaper and approximate."""
    draft: Literal["auto", "none"] = "auto"
    """Speculative decoding with the checkpoint's own draft stages, where it has some."""
    json: bool = False
    """Print one JSON object at the end instead of text as it comes."""

    def run(self) -> None:
        prompt = {"prompt_token_ids": _ids("--token-ids", self.token_ids)} if self.token_ids else None
        if prompt and self.prompt != STDIN:
            raise RequestError("both a prompt and --token-ids were given; give one of them")
        text = "" if prompt else _text(self.prompt)
        if not prompt and not text:
            raise RequestError(
                "the prompt is empty: give a text, or --token-ids with the id of the beginning-of-sequence token to "
                "continue nothing at all"
            )
        llm = self.load(prefill=self.prefill, draft=None if self.draft == "none" else self.draft)
        from finback.engine.request import SamplingParams

        sampling = SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
        )
        if self.json:
            output = llm.generate([prompt or text], sampling)[0]
            keys = ("prompt_token_ids", "token_ids", "text", "finish_reason")
            print(json.dumps({key: getattr(output, key) for key in keys}, ensure_ascii=False))
        else:
            _stream(llm, prompt or text, sampling)


@dataclass(frozen=True, kw_only=True)
class Score(ModelFlags):
    """Log-probability of every token of a text, and its perplexity."""

    text: Annotated[Positional[str], arg(metavar="[TEXT]")] = STDIN
    """The text to score; "-" reads it from stdin."""
    token_ids: str = ""
    """Comma-separated token ids instead of text, e.g. 1,2,3."""
    splits: str = ""
    """Lengths of the chunks that the tokens are fed in, e.g. 7,1,40, adding up to the number of tokens. The result must
    not depend on them."""
    json: bool = False
    """Print one JSON object instead of a table."""

    def run(self) -> None:
        if self.token_ids and self.text != STDIN:
            raise RequestError("both a text and --token-ids were given; give one of them")
        ids = _ids("--token-ids", self.token_ids) if self.token_ids else []
        splits = _ids("--splits", self.splits) if self.splits else None
        text = "" if ids else _text(self.text)
        if not ids and not text:
            raise RequestError("the text is empty, so there is nothing to score")
        llm = self.load(draft=None)
        if not ids:
            if llm.tokenizer is None:
                raise RequestError(
                    f"{self.model or 'finback-mini'} has no tokenizer, so it cannot score text; give --token-ids 1,2,3"
                )
            ids = llm.encode(text)
        logprobs = _logprobs(llm.score(ids, splits=splits), ids)
        perplexity = math.exp(min(-sum(logprobs) / len(logprobs), 700.0)) if logprobs else None
        if self.json:
            print(json.dumps({"token_ids": ids, "logprobs": [None, *logprobs], "perplexity": perplexity}))
        else:
            _print_scores(llm, ids, logprobs, perplexity)


@dataclass(frozen=True, kw_only=True)
class Chat(ModelFlags):
    """Chat with the model in the terminal. /help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves."""

    system: str = ""
    """What the model is told before the first message."""
    think: Literal["off", "low", "high", "max"] = "high"
    """How thoroughly the model thinks before it answers."""
    max_tokens: int = 8192
    """Longest answer, reasoning included."""
    temperature: float = 1.0
    """0 takes the likeliest token every time."""
    top_p: float = 1.0
    """Sample among the likeliest tokens whose probabilities add up to this; 1 keeps all."""
    seed: int | None = None
    """The same seed gives the same answers."""
    draft: Literal["auto", "ngram", "none"] = "auto"
    """Speculative decoding: the checkpoint's own draft stages, repetitions in the text, or none."""

    def run(self) -> None:
        from finback.engine.request import SamplingParams

        sampling = SamplingParams(
            max_tokens=self.max_tokens, temperature=self.temperature, top_p=self.top_p, seed=self.seed
        )
        llm = self.load(draft=None if self.draft == "none" else self.draft, max_num_seqs=1)
        from finback.io.conversation import ChatOptions
        from finback.tools import chat

        options = ChatOptions(thinking=self.think != "off", effort=chat.EFFORTS.get(self.think))
        watched = sys.stdout.isatty()
        dim, plain = ("\x1b[2m", "\x1b[0m") if watched else ("", "")
        session = chat.Session(llm, sampling, options, self.system, dim=dim, plain=plain)
        session.run(chat.lines_of_terminal("> " if watched and sys.stdin.isatty() else ""))


@dataclass(frozen=True, kw_only=True)
class Serve(ModelFlags):
    """Serve the model over HTTP as OpenAI's clients expect it, with a chat page at /. Needs the extra `serve`."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 lets other machines in."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    api_key: Annotated[list[str], arg(metavar="KEY"), UseAppendAction] = field(default_factory=list)
    """A key that clients must send. May be repeated; any of them is accepted. FINBACK_API_KEY adds one."""
    served_model_name: str = ""
    """The name that clients use. Default: the last part of --model."""
    max_model_len: int | None = None
    """Most tokens of a prompt and its answer. Default: the model's positions."""
    max_num_seqs: int = 32
    """Requests that run at once."""
    max_num_batched_tokens: int = 2048
    """Tokens of one forward; longer prompts are cut."""
    max_queued_requests: int = 256
    """Requests that may wait; more are sent away with 429."""
    kv_cache_memory_bytes: int | None = None
    """Memory for what the model remembers. Default: what the requests need, at most 2 GiB."""
    no_enable_prefix_caching: bool = False
    """Do not reuse what equal beginnings of prompts have computed."""
    draft: Literal["auto", "ngram", "none"] = "auto"
    """Speculative decoding: the checkpoint's own draft stages, repetitions in the text, or none."""
    request_timeout: float | None = None
    """Seconds for a whole answer. Default: any time."""
    drain_timeout: float = 30.0
    """Seconds that open requests have to end after SIGTERM."""
    max_body_bytes: int = 64 * 2**20
    """Largest request."""
    max_images: int = 16
    """Images of one request."""
    allow_remote_images: bool = False
    """Fetch images from http(s) addresses on the public internet."""
    log_prompts: bool = False
    """Put the text of prompts into the log."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """How much to log on stderr."""

    def run(self) -> None:
        try:
            from finback.server.backend import LocalBackend
            from finback.server.serve import serve, set_up_logs
            from finback.server.service import Settings
        except ImportError as error:
            raise ConfigError(f"serving needs {error.name}: pip install 'finback[serve]'") from None
        llm = self.load(
            draft=None if self.draft == "none" else self.draft,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            kv_cache_memory_bytes=self.kv_cache_memory_bytes,
            enable_prefix_caching=not self.no_enable_prefix_caching,
        )
        settings = Settings(
            api_keys=tuple(key for key in (*self.api_key, os.environ.get("FINBACK_API_KEY", "")) if key),
            max_concurrent=self.max_num_seqs + self.max_queued_requests,
            max_body_bytes=self.max_body_bytes,
            max_images=self.max_images,
            request_timeout=self.request_timeout,
            remote_images=self.allow_remote_images,
            log_prompts=self.log_prompts,
            version=__version__,
        )
        name = self.served_model_name or os.path.basename(self.model.rstrip("/")) or self.model or "finback-mini"
        set_up_logs(self.log_level)
        serve(
            LocalBackend(llm, name),
            settings,
            host=self.host,
            port=self.port,
            drain_seconds=self.drain_timeout,
            on_start=lambda port: print(f"serving {name} on http://{self.host}:{port}", flush=True),
        )


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """What is in a checkpoint, from its headers alone: counts, bytes by role, formats."""

    where: Annotated[Positional[str], arg(metavar="MODEL")]
    """Folder of the checkpoint, or a hub id."""
    json: bool = False
    """Print JSON instead of tables."""

    def run(self) -> None:
        from rich.console import Console

        from finback.tools import inspect

        report = inspect.inspect(self.where)
        if self.json:
            print(report.to_json())
        else:
            # A pipe has no width; 80 columns would fold the rows of the tables.
            Console(width=None if sys.stdout.isatty() else 160).print(inspect.render(report))


@dataclass(frozen=True, kw_only=True)
class Fixtures:
    """Write a tiny checkpoint of the released layout, with random weights and a real tokenizer."""

    action: Annotated[Positional[Literal["make"]], arg(metavar="make")]
    """make: write the checkpoint."""
    dir: Annotated[Positional[str], arg(metavar="DIR")]
    """Folder to write."""
    preset: str = "tiny-v41"
    """Which checkpoint: tiny-v41, tiny-v41-plain (float32), tiny-v32 or tiny-spikewhale."""

    def run(self) -> None:
        from finback.tools import fixtures

        fixtures.make(self.dir, preset=self.preset)
        print(f'wrote {self.preset} to {self.dir}; try: finback generate --model {self.dir} "Once upon a time"')


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a model from a recipe; the same command goes on after an interruption."""

    recipe: Annotated[Positional[str], arg(metavar="RECIPE")]
    """TOML file that describes the run."""
    out: str = ""
    """Folder of the run. Default: runs/ and the recipe's name."""
    set: Annotated[list[str], arg(metavar="KEY=VALUE"), UseAppendAction] = field(default_factory=list)
    """Change a key of the recipe, e.g. run.steps=100 or data.sources.text.path=stories.jsonl. May be repeated."""
    dry_run: bool = False
    """Print parameters, memory, operations and an estimate of the time, and stop."""

    def run(self) -> None:
        from finback.train.recipe import read_recipe

        recipe = read_recipe(self.recipe, self.set)
        if self.dry_run:
            from finback.train.estimate import estimate

            print(estimate(recipe).text())
            return
        from finback.base.runtime import rank
        from finback.train.trainer import Trainer

        folder = Trainer(recipe, self.out or f"runs/{recipe.name}").run()
        if rank() == 0:  # of the processes that torchrun may have started
            print(folder)


@dataclass(frozen=True, kw_only=True)
class Quantise:
    """Write a checkpoint in its family's quantised layout: FP8 matrices, FP4 experts for DeepSeek-V4.1."""

    source: Annotated[Positional[str], arg(metavar="SOURCE")]
    """Folder of the checkpoint to read, or a hub id."""
    target: Annotated[Positional[str], arg(metavar="TARGET")]
    """Folder to write."""
    expert: Literal["auto", "fp4", "fp8"] = "auto"
    """Type of routed experts. auto: as the family was released."""
    table: Literal["fp8", "bf16"] = "fp8"
    """Type of Engram tables."""
    shard_mib: int = 4096
    """Largest file, in MiB. A tensor that is larger gets a file of its own."""

    def run(self) -> None:
        if self.shard_mib < 1:
            raise ConfigError(f"--shard-mib {self.shard_mib} must be at least 1")
        with _progress_bar(f"quantising {self.source}") as progress:
            from finback.io.quantise import QuantLayout, quantise_checkpoint

            layout = QuantLayout(None if self.expert == "auto" else self.expert, self.table)
            quantise_checkpoint(self.source, self.target, layout, shard_bytes=self.shard_mib << 20, progress=progress)
        print(self.target)


@dataclass(frozen=True, kw_only=True)
class Eval(ModelFlags):
    """Measure a model: "mini" asks what its training on finback's own data should have taught; any other names are
    tasks of lm-evaluation-harness (the extra `eval`)."""

    tasks: Annotated[Positional[tuple[str, ...]], arg(metavar="mini|TASK...")]
    """"mini", or the names of tasks."""
    out: str = ""
    """Also write the results to this file, as JSON."""
    count: int = 200
    """mini: samples of each kind."""
    seed: int = 0
    """mini: of the samples."""
    held_out: Annotated[list[str], arg(metavar="NAME=PATH"), UseAppendAction] = field(default_factory=list)
    """mini: JSON lines, texts or chats, to take nats per token of. May be repeated."""
    held_out_share: float = 1.0
    """mini: the share of those documents that training held out, the recipe's data.held_out. 1 takes all of them."""
    limit: int | None = None
    """Tasks: examples of each."""
    num_fewshot: int | None = None
    """Tasks: solved examples in front of each question; the task's own number if left out."""

    def run(self) -> None:
        from pathlib import Path

        target = Path(self.out).expanduser()
        if self.out and not target.parent.is_dir():
            raise ConfigError(f"--out {self.out}: there is no folder {target.parent}")
        report = self._mini() if "mini" in self.tasks else self._tasks()
        if self.out:
            target.write_text(json.dumps(report, indent=2, default=str) + "\n", encoding="utf-8")

    def _mini(self) -> dict[str, Any]:
        if self.tasks != ("mini",):
            raise ConfigError("mini stands alone; run the tasks of the harness with a command of their own")
        pairs = [tuple(entry.split("=", 1)) for entry in self.held_out]
        if bad := next((entry for entry in self.held_out if "=" not in entry), None):
            raise ConfigError(f"--held-out {bad!r} is not of the form NAME=PATH")
        from finback.tools.evaluate import Settings, evaluate

        files: Any = tuple(pairs)
        settings = Settings(count=self.count, seed=self.seed, files=files, share=self.held_out_share)
        return evaluate(self.load, settings, say=lambda lines: print(lines, flush=True))

    def _tasks(self) -> dict[str, Any]:
        if not self.tasks:
            raise ConfigError("nothing to measure was named; use mini, or tasks of lm-evaluation-harness")
        try:
            from finback.integrations.lm_eval import evaluate
        except ImportError:
            raise ConfigError(
                "tasks need lm-evaluation-harness: pip install 'finback[eval]' (mini works without it)"
            ) from None
        report = evaluate(self.load(), self.tasks, limit=self.limit, num_fewshot=self.num_fewshot)
        for task, metrics in report.items():
            shown = "  ".join(f"{k.split(',')[0]}: {v:.4f}" for k, v in metrics.items() if isinstance(v, float))
            print(f"{task:28} {shown}")
        return report


Verb = (
    Annotated[Generate, subcommand("generate")]
    | Annotated[Chat, subcommand("chat")]
    | Annotated[Serve, subcommand("serve")]
    | Annotated[Score, subcommand("score")]
    | Annotated[Inspect, subcommand("inspect")]
    | Annotated[Fixtures, subcommand("fixtures")]
    | Annotated[Train, subcommand("train")]
    | Annotated[Quantise, subcommand("quantise")]
    | Annotated[Eval, subcommand("eval")]
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (None: the process's own) and return its exit code.

    Raises SystemExit for --help (0) and for wrong usage (2).
    """
    args = list(sys.argv[1:] if argv is None else argv)
    if args == ["--version"]:
        print(f"finback {__version__}")
        return 0
    try:
        verb: Any = tyro.cli(
            Verb,
            prog="finback",
            args=args or ["--help"],
            description="Run and check DeepSeek-V4.1 on any machine. `finback --version` prints the version.",
            config=(OmitSubcommandPrefixes, FlagCreatePairsOff),
        )
        verb.run()
        sys.stdout.flush()
    except FinbackError as error:
        if os.environ.get("FINBACK_TRACEBACK") == "1":
            raise
        print(f"finback: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Python flushes stdout once more at exit, which would fail again with a message.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0


def _ids(flag: str, given: str) -> list[int]:
    """The whole numbers of a comma-separated list."""
    try:
        return [int(part) for part in given.split(",")]
    except ValueError:
        raise RequestError(f"{flag} {given!r} is not a comma-separated list of whole numbers such as 1,2,3") from None


def _text(given: str) -> str:
    """The text given on the command line, or all of stdin for "-"."""
    if given != STDIN:
        return given
    if sys.stdin is None or sys.stdin.isatty():
        raise RequestError("there is no text: give it as an argument, pipe it into stdin, or give --token-ids 1,2,3")
    return sys.stdin.read()


@contextmanager
def _progress_bar(title: str) -> Generator[Callable[[int, int], None] | None]:
    """A bar on stderr for the body, which reports (bytes done, bytes in all); None where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _stream(llm: LLM, prompt: Any, sampling: Any) -> None:
    """Print each piece of the continuation as it comes: text, or comma-separated ids where there is no tokenizer."""
    from finback.tools.terminal import visible

    comma, watched = "", sys.stdout.isatty()
    try:
        for delta in llm.stream(prompt, sampling):
            piece = visible(delta.text) if watched else delta.text
            if llm.tokenizer is None:
                piece = "".join(f"{comma if i == 0 else ','}{token}" for i, token in enumerate(delta.token_ids))
                comma = "," if piece else comma
            sys.stdout.write(piece)
            sys.stdout.flush()
    finally:
        # Also after an error or Ctrl-C, so that what comes next starts on a line of its own.
        sys.stdout.write("\n")


def _logprobs(logits: Any, ids: list[int]) -> list[float]:
    """log p(ids[i] | ids[:i]) for i = 1 .. n-1 from logits [n, V]."""
    import torch

    following = torch.tensor(ids[1:], dtype=torch.int64, device=logits.device)
    chosen = logits[: len(ids) - 1].gather(1, following[:, None])[:, 0]
    return (chosen - logits[: len(ids) - 1].logsumexp(1)).tolist()


def _print_scores(llm: LLM, ids: list[int], logprobs: list[float], perplexity: float | None) -> None:
    print(f"{'position':>8}  {'token':>8}  {'logprob':>10}")
    for position, (token, logprob) in enumerate(zip(ids, [None, *logprobs], strict=True)):
        shown = "-" if logprob is None else f"{logprob:.4f}"
        text = "" if llm.tokenizer is None else f"  {llm.tokenizer.decode([token])!r}"
        print(f"{position:>8}  {token:>8}  {shown:>10}{text}")
    if perplexity is None:
        print("one token: nothing to predict")
    else:
        mean = -sum(logprobs) / len(logprobs)
        print(f"{len(logprobs)} predicted tokens, mean {mean:.4f} nats, perplexity {perplexity:.4f}")
