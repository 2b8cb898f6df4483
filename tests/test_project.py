"""Rules for the project as a whole: one test command, nothing that only works on one machine, files of a readable size.

Would catch: a README whose commands rotted, a path of somebody's machine in a test, a data set that slipped in.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

import finback
from finback.cli import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAX_LINES = 600
MAX_TEST_DATA = 25 * 2**20

# Spelled in halves, so that this file passes its own test.
PATHS = ["/ro" + "ot/", "/wo" + "rk/", "/ho" + "me/", "/opt/" + "wheels", "../sha" + "red", "C:" + "\\Users"]
REGISTRIES = [
    "pypi" + ".org",
    "python" + "hosted.org",
    "download.pyt" + "orch.org",
    "npm" + "js.org",
    "deb.deb" + "ian",
]


def block(marker: str) -> str:
    """The fenced block of the README that follows the comment `marker`."""
    found = re.search(rf"<!-- {marker} -->\n```\w+\n(.*?)\n```", README, flags=re.DOTALL)
    assert found, f"README.md has no fenced block after <!-- {marker} -->"
    return found[1]


def committed_files() -> list[Path]:
    """Every file that is, or is about to be, part of the repository."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs a git checkout")
    return [path for name in names if name and (path := ROOT / name).is_file()]


def texts() -> dict[str, str]:
    found = {}
    for path in committed_files():
        with contextlib.suppress(UnicodeDecodeError):
            found[str(path.relative_to(ROOT))] = path.read_text(encoding="utf-8")
    return found


def test_ci_runs_the_test_command_of_the_readme():
    """Two places that say how to run the tests will differ one day; .ci/run must take it from the README."""
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    extraction = re.search(r"^test_command=\$\(.*\)$", script, flags=re.MULTILINE)
    assert extraction
    shell = subprocess.run(
        ["bash", "-c", f'{extraction[0]}\nprintf "%s" "$test_command"'], cwd=ROOT, capture_output=True, text=True
    )
    assert shell.stdout == block("test-command")
    assert 'bash -euo pipefail -c "$test_command"' in script
    rest = [line for line in script.splitlines() if "pytest" in line and not line.lstrip().startswith("#")]
    assert rest == [], "a second way to run the tests"


def test_readme_commands_install_what_they_say():
    """Both commands work in a fresh clone: they make the environment, and name requirements and extras that exist."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for marker in ("main-command", "test-command"):
        command = block(marker)
        assert "\n" not in command and command.startswith("python3 -m venv .venv && .venv/bin/pip install ")
        words = shlex.split(command)
        assert (ROOT / words[words.index("-r") + 1]).is_file()
        wanted = re.search(r"\[(.*)\]", words[words.index("-e") + 1])
        assert wanted is None or set(wanted[1].split(",")) <= set(extras)


def test_readme_opens_with_what_a_newcomer_needs():
    """One sentence, the main command, the tests and the example come before any explanation."""
    first_screen = README.splitlines()[:45]
    positions = [first_screen.index(f"<!-- {m} -->") for m in ("main-command", "test-command", "example")]
    assert positions == sorted(positions)


def test_readme_commands_and_example_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What a newcomer types first, in an empty folder: generation, then the Python example as it stands."""
    monkeypatch.chdir(tmp_path)
    verbs = [part.strip() for part in block("main-command").split("&&") if ".venv/bin/finback" in part]
    assert len(verbs) == 1
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        codes = [main(shlex.split(verb)[1:]) for verb in verbs]
        exec(compile(block("example"), "README.md", "exec"), {"__name__": "readme"})
    assert codes == [0]
    difference = float(out.getvalue().rsplit("largest difference:", 1)[1])
    assert difference <= 5e-5


def test_nothing_belongs_to_one_machine():
    """Paths of a developer's machine and hosts of package registries: both are the business of whoever installs."""
    bad = [
        f"{name}: {word}"
        for name, text in texts().items()
        for word in PATHS + REGISTRIES
        if word in text and name != ".git"
    ]
    assert not bad, bad


def test_test_data_stays_small():
    """A clone is what a newcomer waits for first."""
    size = sum(path.stat().st_size for path in committed_files() if path.is_relative_to(ROOT / "tests" / "data"))
    assert size < MAX_TEST_DATA, f"tests/data holds {size / 2**20:.1f} MiB"


def test_long_files_say_why():
    """Files aim at 100-350 lines; one past 600 is split, or its docstring has a line "Length: ..." that says why."""
    long = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        lines = path.read_text(encoding="utf-8").splitlines()
        if len(lines) > MAX_LINES and not any(line.startswith("Length: ") for line in lines[:40]):
            long.append(f"{path.relative_to(ROOT)}: {len(lines)} lines")
    assert not long, long


def test_no_unfinished_business():
    """Placeholders in shipped code: what is not there is not announced."""
    words = re.compile("TO" + r"DO\b|FIX" + r"ME\b|XX" + r"X\b|NotImplemented" + "Error")
    bad = [name for name, text in texts().items() if name.endswith((".py", ".md")) and words.search(text)]
    assert not bad, bad


def test_links_between_pages_lead_somewhere():
    """A moved page leaves dead links behind."""
    dead = []
    for name, text in texts().items():
        if name.endswith(".md"):
            for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
                if "://" not in target and not (ROOT / name).parent.joinpath(target).exists():
                    dead.append(f"{name}: {target}")
    assert not dead, dead


def test_architecture_names_every_component():
    """The map of the code is the page that newcomers trust; a component that it omits does not exist for them."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    parts = {p.name if p.is_dir() else p.stem for p in (ROOT / "src" / "finback").iterdir()}
    missing = {part for part in parts if not part.startswith("_") and part != "py" and f"`{part}" not in page}
    assert missing == set()


def test_version_is_stated_once():
    """The installed package's version comes from __init__.py, and the changelog has a place for what comes next."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert config["tool"]["hatch"]["version"]["path"] == "src/finback/__init__.py"
    assert re.fullmatch(r"\d+\.\d+\.\d+", finback.__version__)
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
