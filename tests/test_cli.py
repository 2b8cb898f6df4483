"""The command line: what reaches the model, what reaches stdout and when, and which exit code a mistake gets.

The model is a stand-in, so a failure here is the command line's own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch

from finback.base.runtime import CheckpointError, RequestError
from finback.cli import main

SRC = Path(__file__).parents[1] / "src"


@dataclass
class Delta:
    text: str
    token_ids: list[int]
    finish_reason: str | None = None


@dataclass
class Output(Delta):
    prompt_token_ids: list[int] = field(default_factory=list)


class Letters:
    """A tokenizer of 26 letters."""

    def encode(self, text: str) -> list[int]:
        return [ord(c) - ord("a") for c in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(i + ord("a")) for i in ids)


class FakeLLM:
    """Records its arguments; continues every prompt with x, y, z; gives token i + 1 after token i logit 1, others 0."""

    made: list[FakeLLM]
    tokenizer: Letters | None = Letters()

    def __init__(self, model: str, **options: Any) -> None:
        self.model, self.options, self.calls = model, options, []
        self.made.append(self)
        if model == "missing":
            raise CheckpointError("there is no checkpoint in missing; give a folder that holds config.json")

    def stream(self, prompt: Any, sampling: Any) -> Iterator[Delta]:
        self.calls.append((prompt, sampling))
        for letter in "xyz":
            yield Delta(letter if self.tokenizer else "", [ord(letter) - ord("a")])

    def generate(self, prompts: list[Any], sampling: Any) -> list[Output]:
        self.calls.append((prompts[0], sampling))
        return [Output("xÿz", [23, 24, 25], "length", prompt_token_ids=[0, 1])]

    def encode(self, text: str) -> list[int]:
        assert self.tokenizer is not None
        return self.tokenizer.encode(text)

    def score(self, token_ids: list[int], splits: list[int] | None = None) -> torch.Tensor:
        self.calls.append((token_ids, splits))
        return torch.eye(27)[[i + 1 for i in token_ids]]


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    fake = type("LLM", (FakeLLM,), {"made": []})
    engine, request = types.ModuleType("finback.engine.llm"), types.ModuleType("finback.engine.request")
    engine.LLM = fake
    request.SamplingParams = lambda **fields: fields
    monkeypatch.setitem(sys.modules, engine.__name__, engine)
    monkeypatch.setitem(sys.modules, request.__name__, request)
    return fake


def finback(*args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """The real command, for what cannot be seen from inside a process."""
    env = {**os.environ, "PYTHONPATH": str(SRC), "COLUMNS": "200"}
    command = [sys.executable, "-m", "finback", *args]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=60, **options)


def test_generate_passes_flags_in_the_words_of_the_python_surface(llm, capsys):
    """A flag that is parsed and then dropped would silently give the default."""
    args = "--model m --dtype float64 --rounding off --backend torch --device cpu --prefill full --draft none".split()
    args += "--max-tokens 9 --temperature 0.5 --top-p 0.9 --top-k 7 --seed 3".split()
    assert main(["generate", *args, "hello"]) == 0
    (made,) = llm.made
    options = {"dtype": "float64", "rounding": "off", "backend": "torch", "device": "cpu"}
    assert (made.model, made.options) == ("m", {**options, "prefill": "full", "draft": None, "progress": None})
    sampling = {"max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 3}
    assert made.calls == [("hello", sampling)]
    assert capsys.readouterr().out == "xyz\n"


def test_defaults_leave_the_choice_to_the_checkpoint(llm):
    """ "auto" is a word of the command line; the Python surface says None."""
    assert main(["generate", "--model", "m", "hello"]) == 0
    options = llm.made[0].options
    assert (options["dtype"], options["rounding"], options["draft"]) == (None, None, "auto")


def test_the_python_surface_takes_what_the_command_line_gives():
    """The stand-in takes anything; a renamed argument would fail only for a user."""
    from finback.engine.llm import LLM
    from finback.engine.request import SamplingParams

    taken = set(signature(LLM).parameters)
    assert taken >= {"model", "device", "dtype", "rounding", "backend", "prefill", "draft", "progress"}
    assert set(signature(SamplingParams).parameters) >= {"max_tokens", "temperature", "top_p", "top_k", "seed"}
    assert "splits" in signature(LLM.score).parameters and callable(LLM.stream) and callable(LLM.generate)


def test_loading_shows_a_bar_to_a_person_only(llm, monkeypatch, capsys):
    """A bar in a log file is noise, and one on stdout would corrupt the result."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert main(["generate", "--model", "m", "hi"]) == 0
    progress = llm.made[0].options["progress"]
    assert progress is not None
    progress(5, 10)
    assert capsys.readouterr().out == "xyz\n"


def test_text_is_printed_as_it_comes(llm, monkeypatch):
    """Collecting the whole answer first would look the same in the end, and dead until then."""
    events: list[str] = []

    class Out:
        def isatty(self) -> bool:
            return False

        def write(self, text: str) -> None:
            events.append(text)

        def flush(self) -> None:
            events.append("flush")

    def stream(self: FakeLLM, prompt: Any, sampling: Any) -> Iterator[Delta]:
        for letter in "xy":
            events.append(f"made {letter}")
            yield Delta(letter, [0])

    monkeypatch.setattr(llm, "stream", stream)
    monkeypatch.setattr(sys, "stdout", Out())
    assert main(["generate", "--model", "m", "hello"]) == 0
    assert events[:6] == ["made x", "x", "flush", "made y", "y", "flush"]


def test_token_ids_in_and_out_without_a_tokenizer(llm, monkeypatch, capsys):
    """Deltas without text would print nothing at all; ids of different deltas must not run together."""
    monkeypatch.setattr(llm, "tokenizer", None)
    assert main(["generate", "--model", "m", "--token-ids", "1,2,3"]) == 0
    assert llm.made[0].calls[0][0] == {"prompt_token_ids": [1, 2, 3]}
    assert capsys.readouterr().out == "23,24,25\n"


def test_json_is_one_document_on_stdout(llm, capsys):
    assert main(["generate", "--model", "m", "--json", "ab"]) == 0
    expected = {"prompt_token_ids": [0, 1], "token_ids": [23, 24, 25], "text": "xÿz", "finish_reason": "length"}
    assert json.loads(capsys.readouterr().out) == expected


@pytest.mark.parametrize("args", [[], ["-"]])
def test_prompt_from_stdin_is_taken_whole(llm, monkeypatch, args):
    """Stripping would change the tokens: a newline at the end is part of the prompt."""
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(isatty=lambda: False, read=lambda: " a\nb\n"))
    assert main(["generate", "--model", "m", *args]) == 0
    assert llm.made[0].calls[0][0] == " a\nb\n"


def test_a_prompt_that_looks_like_a_keyword_stays_text(llm):
    """The command line's parser reads None and True as values where a type allows it."""
    for text in ("None", "True", "{}", "1"):
        assert main(["generate", "--model", "m", text]) == 0
    assert [made.calls[0][0] for made in llm.made] == ["None", "True", "{}", "1"]


def test_score_of_text(llm, capsys):
    """An off-by-one between logits and tokens: after "a", "b" has logit 1 among 26 zeros; after "b", "d" has 0."""
    assert main(["score", "--model", "m", "abd", "--splits", "2,1", "--json"]) == 0
    assert llm.made[0].calls == [([0, 1, 3], [2, 1])]
    assert llm.made[0].options["draft"] is None
    result = json.loads(capsys.readouterr().out)
    log_z = torch.tensor([1.0] + [0.0] * 26).logsumexp(0).item()
    expected = [1 - log_z, -log_z]
    assert result["token_ids"] == [0, 1, 3] and result["logprobs"][0] is None
    assert result["logprobs"][1:] == pytest.approx(expected, abs=1e-6)
    assert result["perplexity"] == pytest.approx(torch.tensor(expected).mean().neg().exp().item(), abs=1e-5)


def test_score_prints_one_row_a_token(llm, capsys):
    assert main(["score", "--model", "m", "--token-ids", "0,1"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["0", "0", "-", "'a'"]
    assert lines[2][:2] == ["1", "1"] and lines[2][3] == "'b'" and float(lines[2][2]) < 0
    assert lines[3][0] == "1" and lines[3][-2] == "perplexity"
    assert main(["score", "--model", "m", "--token-ids", "5"]) == 0
    assert capsys.readouterr().out.endswith("one token: nothing to predict\n")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["generate", "--model", "missing", "hi"], ["missing", "config.json"]),
        (["generate", "--model", "m", "--token-ids", "1,b"], ["'1,b'", "1,2,3"]),
        (["generate", "--model", "m", "--token-ids", "1", "hi"], ["--token-ids", "one of them"]),
        (["score", "--model", "m", "--token-ids", "1", "hi"], ["--token-ids", "one of them"]),
        (["score", "--model", "m", "ab", "--splits", "2;1"], ["--splits", "'2;1'"]),
        (["score", "--model", "m", ""], ["empty"]),
    ],
)
def test_mistakes_get_one_line_and_exit_code_2(llm, capsys, args, words):
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("finback: error: ") and err.count("\n") == 1
    assert all(word in err for word in words), err


def test_score_of_text_without_a_tokenizer_names_the_way_out(llm, monkeypatch, capsys):
    monkeypatch.setattr(llm, "tokenizer", None)
    assert main(["score", "--model", "m", "ab"]) == 2
    assert "--token-ids" in capsys.readouterr().err


def test_a_terminal_is_not_waited_for(llm, monkeypatch, capsys):
    """Reading stdin of a terminal would hang with no word said."""
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(isatty=lambda: True))
    assert main(["generate", "--model", "m"]) == 2
    assert "--token-ids" in capsys.readouterr().err and llm.made == []


def test_traceback_on_request(llm, monkeypatch):
    monkeypatch.setenv("FINBACK_TRACEBACK", "1")
    with pytest.raises(CheckpointError):
        main(["generate", "--model", "missing", "hi"])


def test_an_error_in_the_middle_keeps_the_text_so_far_on_its_own_line(llm, monkeypatch, capsys):
    def stream(self: FakeLLM, prompt: Any, sampling: Any) -> Iterator[Delta]:
        yield Delta("partial", [0])
        raise RequestError("layer 3 gave NaN")

    monkeypatch.setattr(llm, "stream", stream)
    assert main(["generate", "--model", "m", "hi"]) == 2
    assert capsys.readouterr() == ("partial\n", "finback: error: layer 3 gave NaN\n")


def test_our_own_mistakes_are_not_hidden(llm, monkeypatch):
    """Catching everything would turn bugs into one-line "errors" that nobody can report."""

    def stream(self: FakeLLM, prompt: Any, sampling: Any) -> Iterator[Delta]:
        raise TypeError("a bug")
        yield

    monkeypatch.setattr(llm, "stream", stream)
    with pytest.raises(TypeError, match="a bug"):
        main(["generate", "--model", "m", "hi"])


def test_interrupt(llm, monkeypatch, capsys):
    def stream(self: FakeLLM, prompt: Any, sampling: Any) -> Iterator[Delta]:
        yield Delta("x", [0])
        raise KeyboardInterrupt

    monkeypatch.setattr(llm, "stream", stream)
    assert main(["generate", "--model", "m", "hi"]) == 130
    assert capsys.readouterr() == ("x\n", "")


def test_inspect_and_fixtures_reach_their_tools(monkeypatch, capsys):
    report = types.SimpleNamespace(to_json=lambda: '{"bytes": 1}')
    inspect, fixtures = types.ModuleType("finback.tools.inspect"), types.ModuleType("finback.tools.fixtures")
    inspect.inspect = lambda where: report if where == "m" else None
    inspect.render = lambda given: "a table" if given is report else None
    made: list[Any] = []
    fixtures.make = lambda folder, *, preset: made.append((folder, preset))
    for module in (inspect, fixtures):
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr("finback.tools." + module.__name__.rsplit(".", 1)[1], module, raising=False)
    assert main(["inspect", "m"]) == 0
    assert capsys.readouterr().out == "a table\n"
    assert main(["inspect", "m", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"bytes": 1}
    assert main(["fixtures", "make", "d", "--preset", "p"]) == 0
    assert main(["fixtures", "make", "d"]) == 0
    assert made == [("d", "p"), ("d", "tiny-v41")]
    assert "finback generate --model d" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("verb", "flags"),
    [
        (
            "generate",
            "--model --device --dtype --rounding --backend --prefill --draft --token-ids --max-tokens --temperature "
            "--top-p --top-k --seed --json",
        ),
        ("score", "--model --device --dtype --rounding --backend --token-ids --splits --json"),
        (
            "chat",
            "--model --device --dtype --rounding --backend --system --think --max-tokens --temperature --top-p --seed "
            "--draft",
        ),
        (
            "serve",
            "--model --device --dtype --rounding --backend --host --port --api-key --served-model-name --max-model-len "
            "--max-num-seqs --max-num-batched-tokens --max-queued-requests --kv-cache-memory-bytes "
            "--no-enable-prefix-caching --draft --request-timeout --drain-timeout --max-body-bytes --max-images "
            "--allow-remote-images --log-prompts --log-level",
        ),
        ("inspect", "--json"),
        ("fixtures", "--preset"),
        ("train", "--out --set --dry-run"),
    ],
)
def test_help_lists_exactly_the_flags_and_explains_each(verb: str, flags: str, capsys, monkeypatch):
    """A field without a docstring is a flag without help; a flag renamed in passing changes what scripts rely on."""
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as exit_:
        main([verb, "--help"])
    assert exit_.value.code == 0
    text = re.sub(r"[^\x20-\x7e\n]|\|", " ", capsys.readouterr().out)  # without the frames around it
    help_of = dict(re.findall(r"^\s*(--[a-z][a-z-]*)((?:.|\n(?!\s*--))*)", text, flags=re.MULTILINE))
    assert set(help_of) == set(flags.split())
    for flag, rest in help_of.items():
        words = re.sub(r"^ (STR|INT|FLOAT|\{\S+)|\((default: .*|required)\)", "", rest).split()
        assert len(words) >= 2, f"{flag} has no help: {rest}"


@pytest.mark.parametrize("args", [["--help"], []])
def test_top_level_help_names_every_verb(args, capsys):
    """`finback` alone is how people look for help."""
    with pytest.raises(SystemExit) as exit_:
        main(args)
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert all(verb in text for verb in ("generate", "chat", "serve", "score", "inspect", "fixtures", "train"))


@pytest.mark.parametrize("args", [["inspect"], ["generate", "--model", "m", "--dtype", "int3", "hi"], ["nope"]])
def test_wrong_usage_exits_with_2(args, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(args)
    assert exit_.value.code == 2
    assert capsys.readouterr().out == ""


def test_version_and_help_load_no_torch():
    """Help that takes seconds: the heavy imports belong inside the verbs."""
    version = finback("--version")
    assert (version.returncode, version.stdout) == (0, f"finback {__import__('finback').__version__}\n")
    code = "import sys; from finback.cli import main\ntry: main(['generate', '--help'])\nexcept SystemExit: pass\n"
    code += "assert not {'torch', 'numpy', 'tokenizers', 'safetensors'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(SRC)}, check=True, stdout=-3)


def test_a_reader_that_leaves_is_no_error():
    """`finback ... | head -1` ended in a BrokenPipeError traceback, once from the write and once more at exit."""
    code = (
        "import sys; from finback import cli\n"
        "def run(self):\n    for i in range(100000): print('x' * 100)\n"
        "cli.Inspect.run = run\nsys.exit(cli.main(['inspect', 'm']))"
    )
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env
    ) as process:
        assert process.stdout and process.stderr
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 141
