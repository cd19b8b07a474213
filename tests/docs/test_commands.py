"""Every command that the documentation shows: run as it stands where this machine can in a moment, else planned."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemotron_steps.cli.main import nemotron, steps
from tests.cli.conftest import forget_new_packages, in_process
from tests.docs.pages import PAGES, Command, blocks, commands, read
from tests.models.checkpoints import write_checkpoint

PROGRAMS = {"steps": steps, "nemotron": nemotron}
PLANNED = {"run", "plan"}
ALL = [command for page in PAGES for command in commands(page)]

# The first that matches says why a command is planned, or parsed, and not run.
ELSEWHERE = (
    (r" (-b|--batch|--run) ", "it works on a cluster"),
    (r"^steps cancel ", "it needs a run that is working"),
    (r"^steps env (serve|verify) ", "it serves until it is stopped, or grades rollouts of the reader's"),
    (r"^steps doctor$", "it loads torch to see that it works: tests/cli/test_doctor_and_new.py runs it"),
    (r"^steps (artifacts (lineage eval|export rl)/|publish )", "it needs what a long run makes"),
    (r" (-c|--config) (one_gpu|one_node|swe2_one_gpu)\b(?!.* -d$)", "it needs GPUs"),
    (r"^steps run .*(PATH|FOLDER|MODEL|ROWS)\b", "it needs models or data of the reader's"),
    (r"^steps run data_prep/rl_prep -c ", "it reads published blends, from the hub or a mirror"),
    (r"^nemotron (?!.* -d$)", "it reads published blends, or needs a cluster"),
    (r"^steps run data_prep/swe_tasks -c tiny$", "tests/steps/data_prep run it, in a sandbox"),
    (r"^steps run (?!.* -d$)", "it trains for minutes: tests marked chain do, and docs/benchmarks.md has the times"),
)
SHORT = ("data_prep/rl_prep --input source=rows.jsonl", "acme/filter_prompts --input rows=rows.jsonl")
"""Runs that take a moment."""
PLACEHOLDERS = {
    "RUN": "latest",
    "STEP": "data_prep/rl_prep",
    "NAME": "math_with_judge",
    "SIGNAL": "kl_spike",
    "baseline": "latest",
    "faster": "latest",
    "AGENT": "math_with_judge_simple_agent",
    "A": "data_prep/rl_prep/prompts",
    "B": "data_prep/rl_prep/prompts",
}

REWARDS = [each for page in ("tutorial.md", "howto/own_reward.md") for each in blocks(read(page), "python")]
PROFILE = 'executor = "slurm"\naccount = "a"\npartition = "p"\nnodes = 32\ngpus_per_node = 8\n'


def why_not_run(command: Command) -> str | None:
    """Why a command is not run here; None for one that is."""
    said = " ".join(command.words)
    if any(said == f"steps run {short}" for short in SHORT):
        return None
    return next((reason for pattern, reason in ELSEWHERE if re.search(pattern, said)), None)


RUN = list({str(each.words): each for each in ALL if why_not_run(each) is None}.values())
NOT_RUN = [each for each in ALL if why_not_run(each) is not None]


def test_the_pages_show_commands() -> None:
    assert len(ALL) > 60
    assert len(RUN) > 30
    for pattern, reason in ELSEWHERE:
        assert any(why_not_run(each) == reason for each in ALL), f"no command is left out because {reason}: {pattern}"


def write_files(folder: Path) -> None:
    """What the pages tell the reader to write."""
    (folder / "rewards.py").write_text("\n\n".join(REWARDS))
    (big,) = blocks(read("howto/gpus.md"), "toml")
    others = [f"\n[{name}]\n{PROFILE}" for name in ("cluster", "PROFILE", "YOUR-CLUSTER")]
    (folder / "env.toml").write_text("".join([big, *others]))
    (folder / "mine.toml").write_text(
        '[pipeline]\nname = "mine"\n\n[[stages]]\nstep = "data_prep/rl_prep"\nconfig = "tiny"\n'
    )
    (folder / "my_nemo_rl.yaml").write_text("defaults: [one_node]\n")


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A reader's folder and home, with a model, prompts and a run, that commands are typed in one after the other."""
    folder = tmp_path_factory.mktemp("reader")
    with pytest.MonkeyPatch.context() as patch:
        forget_new_packages(patch)
        patch.chdir(folder)
        patch.setenv("STEPS_HOME", str(folder / "steps_home"))
        write_files(folder)
        write_checkpoint("qwen3", folder / "HF_FOLDER", max_position_embeddings=16384)
        shutil.copytree(folder / "HF_FOLDER", folder / "CHECKPOINT")
        row = {
            "responses_create_params": {"input": [{"role": "user", "content": "1 + 1?"}]},
            "agent_ref": {"name": "math_with_judge_simple_agent"},
            "question": "1 + 1?",
            "expected_answer": "2",
        }
        (folder / "rows.jsonl").write_text("".join(json.dumps({**row, "uuid": str(n)}) + "\n" for n in range(300)))
        (folder / "PROMPTS").mkdir()
        (folder / "PROMPTS" / "train.jsonl").write_text(json.dumps(row) + "\n")
        assert steps(["run", *SHORT[0].split()]) == 0
        yield folder


@pytest.mark.parametrize("command", RUN, ids=str)
def test_a_command_of_the_documentation_does_what_it_says(command: Command, scratch: Path, capsys, monkeypatch) -> None:
    program, *words = command.words
    for variable in ("STEPS_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(variable, str(scratch / variable.lower()))
    for variable, value in command.environment.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.syspath_prepend(str(scratch / command.environment.get("PYTHONPATH", "")))
    result = in_process(PROGRAMS[program], capsys)(*(PLACEHOLDERS.get(word, word) for word in words))
    assert (result.code != 0) == command.refused, f"{command}\n{result.err}"
    assert result.out or command.refused


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the pages tell the reader to write, in an empty folder."""
    forget_new_packages(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STEPS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_files(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", NOT_RUN, ids=str)
def test_a_command_that_is_not_run_here_can_be_planned(command: Command, folder: Path, capsys, monkeypatch) -> None:
    program, name, *words = command.words
    run = in_process(PROGRAMS[program], capsys)
    for variable, value in command.environment.items():
        monkeypatch.setenv(variable, value)
    dry = [word for word in words if word not in ("-d", "--dry-run")]
    if program == "steps" and name in PLANNED and "--resume" not in words:
        result = run("run", *dry, "-d")
    elif program == "nemotron":
        result = run(name, *dry, "-d")
    else:
        result = run(name, *words, "--help")
    assert (result.code != 0) == command.refused, f"{command}\n{result.err}"
