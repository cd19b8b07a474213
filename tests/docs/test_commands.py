"""Every command that the documentation shows: it parses, and what it would run can be planned."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemotron_steps.cli.main import nemotron, steps
from tests.cli.conftest import forget_new_packages, in_process
from tests.docs.pages import PAGES, Command, commands

PLANNED = {"run", "plan"}
ALL = [command for page in PAGES for command in commands(page)]
REWARD = "def score(prompts, completions, **columns):\n    return [0.0 for _ in prompts]\n\n\nbrief = score\n"
PROFILE = 'executor = "slurm"\naccount = "a"\npartition = "p"\nnodes = 32\ngpus_per_node = 8\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the pages tell the reader to write, in an empty folder."""
    forget_new_packages(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STEPS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "rewards.py").write_text(REWARD)
    (tmp_path / "env.toml").write_text(f"[big]\n{PROFILE}\n[PROFILE]\n{PROFILE}\n[YOUR-CLUSTER]\n{PROFILE}")
    (tmp_path / "my_nemo_rl.yaml").write_text("defaults: [one_node]\n")
    return tmp_path


def test_the_pages_show_commands() -> None:
    assert len(ALL) > 60
    assert sum(command.words[1] in PLANNED for command in ALL) > 30


@pytest.mark.parametrize("command", ALL, ids=str)
def test_a_command_of_the_documentation_is_one(command: Command, folder: Path, capsys, monkeypatch) -> None:
    program, name, *words = command.words
    run = in_process({"steps": steps, "nemotron": nemotron}[program], capsys)
    if "acme/filter_prompts" in words and name != "new":
        assert run("new", "acme/filter_prompts").code == 0
    for variable, value in command.environment.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.syspath_prepend(str(folder / command.environment.get("PYTHONPATH", "")))
    dry = [word for word in words if word not in ("-d", "--dry-run")]
    if program == "steps" and name in PLANNED and "--resume" not in words:
        result = run("run", *dry, "-d")
    elif program == "nemotron":
        result = run(name, *dry, "-d")
    else:
        result = run(name, *words, "--help")
    assert (result.code != 0) == command.refused, f"{command}\n{result.err}"
