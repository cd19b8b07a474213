"""Profiles and executors from the command line: what is refused, when, and what a refusal leaves behind."""

import os
import pty
import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import pytest

from nemotron_steps.cli.main import nemotron, steps
from nemotron_steps.errors import RequestError
from nemotron_steps.runs.executors import base
from nemotron_steps.session.submit import JOB_VARIABLE
from tests.cli.conftest import Cli, in_process


class ClosedQueue:
    def submit(self, launch: base.Launch) -> str:
        raise RequestError("the queue is closed")

    def status(self, job: str) -> base.JobStatus:
        return base.JobStatus(base.JobState.LOST)

    def cancel(self, job: str) -> None:
        return None


def install(workplace: Path, monkeypatch: pytest.MonkeyPatch, executor: type) -> None:
    """Have the profile `there` work by an executor."""
    point = EntryPoint("own", f"{__name__}:{executor.__name__}", base.ENTRY_POINT_GROUP)
    monkeypatch.setattr(base, "entry_points", lambda group: [point] if group == base.ENTRY_POINT_GROUP else [])
    (workplace / "env.toml").write_text('[there]\nexecutor = "own"\n')


@pytest.fixture
def closed_queue(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(workplace, monkeypatch, ClosedQueue)


def test_a_refused_submission_is_a_failed_run_that_nothing_waits_for(cli: Cli, closed_queue: None) -> None:
    refused = cli("run", "toy/train", "-c", "tiny", "-b", "there")
    assert refused.code == 2 and "the queue is closed" in refused.err
    (run,) = cli("runs", "--json").json
    assert (run["status"], run["error"]["what"]) == ("failed", "the queue is closed")
    followed = cli("logs", "latest", "-f")
    assert followed.code == 2 and "the queue is closed" in followed.err
    cancelled = cli("cancel", "latest")
    assert cancelled.code == 2 and "is not running" in cancelled.err
    shown = cli("status", "latest")
    assert shown.code == 0 and "the queue is closed" in shown.err + shown.out


class OpenQueue(ClosedQueue):
    taken: ClassVar[list[base.Launch]] = []

    def submit(self, launch: base.Launch) -> str:
        self.taken.append(launch)
        return f"job-{len(self.taken)}"

    def status(self, job: str) -> base.JobStatus:
        return base.JobStatus(base.JobState.TIMED_OUT, "after 4 hours")


@pytest.fixture
def queue(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> list[base.Launch]:
    """What has been handed to the executor of profile `there`."""
    monkeypatch.setattr(OpenQueue, "taken", [])
    install(workplace, monkeypatch, OpenQueue)
    return OpenQueue.taken


def test_a_job_is_given_what_was_asked_for_and_the_next_commands_are_said(cli: Cli, queue: list[base.Launch]) -> None:
    said = cli("run", "toy/train", "-c", "tiny", "-b", "there", "--force", "--name", "mine")
    assert said.code == 0 and "own job job-1" in said.out
    (launch,) = queue
    assert f"steps logs {launch.run_id} -f" in said.out and f"steps cancel {launch.run_id}" in said.out
    assert {"--resume", launch.run_id} <= set(launch.arguments)
    assert cli("status", "mine", "--json").json["forced"] == {"toy/train": ""}
    assert launch.paths == (Path(os.environ["STEPS_PATH"]),)
    profiles = str(Path("env.toml").absolute())
    assert launch.environment == {JOB_VARIABLE: launch.run_id, "NEMOTRON_ENV_FILE": profiles}
    assert not launch.attached and not launch.force_squash
    again = cli("run", "toy/train", "-c", "tiny", "-b", "there", "--resume", launch.run_id, "--json").json
    assert again == {"run": launch.run_id, "executor": "own", "job": "job-2"}
    assert not any("--force" in launch.arguments for launch in queue)  # a job begun again would begin anew
    latest = cli("run", "toy/train", "-c", "tiny", "-b", "there", "--resume", "latest", "--json").json
    assert latest == {"run": launch.run_id, "executor": "own", "job": "job-3"}
    shown = cli("status", "mine")  # asked for again without its name, it keeps it
    assert "own job job-3: timed out (after 4 hours)" in shown.out


def test_variables_that_a_config_reads_go_along_but_for_secrets_and_what_the_profile_sets(
    cli: Cli, queue: list[base.Launch], workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (workplace / "env.toml").open("a") as file:
        file.write('[mine]\nexecutor = "own"\nenv_vars = { TOY_JUDGE = "hub/own" }\n')
    monkeypatch.setenv("TOY_JUDGE", "hub/other")
    monkeypatch.setenv("TOY_UNREAD", "hub/unread")
    monkeypatch.setenv("TOY_API_KEY", "sk-0123456789abcdef")
    monkeypatch.setenv("TOY_THING", "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")
    monkeypatch.setenv("TOY_FOLDER", "/only/on/the/cluster")
    monkeypatch.setenv("USER", "somebody")
    monkeypatch.setenv("TOY_DATA", "chats")
    values = [f"${{oc.env:{name}}}" for name in ("TOY_API_KEY", "TOY_THING", "USER")]
    read = f"passthrough=[{','.join(values)},'${{oc.env:TOY_FOLDER}}/${{oc.env:TOY_DATA}}']"
    for profile in ("there", "mine"):
        assert cli("run", "toy/train", "-c", "tiny", "-b", profile, read).code == 0
    given = [{n: value for n, value in launch.variables.items() if n.startswith(("TOY", "USER"))} for launch in queue]
    read_together = {"TOY_DATA": "chats", "TOY_FOLDER": "/only/on/the/cluster"}
    assert given == [{"TOY_JUDGE": "hub/other", **read_together}, {"TOY_JUDGE": "hub/own", **read_together}]


def test_a_secret_of_the_command_line_is_not_handed_to_a_job(cli: Cli, queue: list[base.Launch]) -> None:
    refused = cli("run", "toy/train", "-c", "tiny", "-b", "there", "judge.api_key=hunter2hunter2")
    assert refused.code == 2 and "a secret on the command line" in refused.err and "hunter2" not in refused.err
    assert queue == [] and cli("runs", "--json").json == []


@pytest.mark.parametrize(
    ("profile", "words", "what", "line"),
    [
        ('executor = "slurm"', ("--force-squash",), "this profile imports none", 1),
        ('executor = "slurm"\nmounts = ["/a:/a"]\ncontainer_image = "x"', ("--home", "a,b"), "':' or ','", 3),
        ('executor = "lepton"\nresource_shape = "cpu"\ncontainer_image = "x"', (), "not see what the run reads", 1),
    ],
    ids=["force-squash", "comma", "home"],
)
def test_what_an_executor_would_refuse_is_listed_by_a_dry_run_and_leaves_no_run(
    cli: Cli, workplace: Path, profile: str, words: tuple[str, ...], what: str, line: int
) -> None:
    (workplace / "env.toml").write_text(f"[there]\n{profile}\n")
    command = ("run", "toy/train", "-c", "tiny", "-b", "there", *words)
    listed = cli(*command, "-d")
    assert listed.code == 0 and "to be filled in" in listed.out and what in listed.out
    refused = cli(*command)
    assert refused.code == 2 and what in refused.err and f"env.toml:{line}" in refused.err and "hint:" in refused.err
    assert cli("runs", "--json").json == []


def test_a_job_that_does_not_see_env_toml_works_without_mirrors(
    cli: Cli, queue: list[base.Launch], workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (workplace / "env.toml").open("a") as file:
        file.write('[tensorboard]\nfolder = "curves"\n')
    assert cli("run", "toy/train", "-c", "tiny", "-b", "there").code == 0
    (launch,) = queue
    for name, value in launch.environment.items():
        monkeypatch.setenv(name, value)
    (workplace / "env.toml").unlink()
    worked = cli("run", *launch.arguments)
    assert worked.code == 0, worked.err
    assert cli("status", launch.run_id, "--json").json["status"] == "done" and not (workplace / "curves").exists()
    monkeypatch.delenv(JOB_VARIABLE)
    refused = cli("run", "toy/train", "-c", "tiny")
    assert refused.code == 2 and "NEMOTRON_ENV_FILE" in refused.err


PAGE = """\
[wandb]
project = "nemotron"
entity = "YOUR-TEAM"
[YOUR-CLUSTER]
executor = "slurm"
account = "YOUR-ACCOUNT"
partition = "batch"
nodes = 2
ntasks_per_node = 8
gpus_per_node = 8
mem = "0"
exclusive = true
mounts = ["/lustre:/lustre"]
"""
"""As the page of the Nano3 recipe has it."""
RAY, SUPER3, SWE = (
    "anyscale/ray:2.49.2-py312",
    "nvidia/nemo-rl:v0.5.0.nemotron_3_super",
    "nvidia/nemo-rl:v0.5.0.nemotron_3_super_swe",
)
NANO3 = "nvidia/nemo-rl:v0.4.0.nemotron_3_nano"
PROMPT = (
    '{"responses_create_params": {"input": [{"role": "user", "content": "What is 2+2?"}]}, "expected_answer": "4",'
    ' "agent_ref": {"type": "responses_api_agents", "name": "math_with_judge_simple_agent"}}\n'
)


@pytest.fixture
def submitted(workplace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """What `nemotron ARGUMENTS` prints, and the options and the script that its job was submitted with."""
    (workplace / "env.toml").write_text(PAGE)
    programs, script = workplace.parent / "bin", workplace.parent / "job.sh"
    programs.mkdir()
    (programs / "sbatch").write_text(f'#!/bin/sh\nfor last; do :; done\ncp "$last" {script}\necho 4711\n')
    (programs / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    run = in_process(nemotron, capsys)

    def submitted(*arguments: str) -> tuple[Any, dict[str, str], str]:
        script.unlink(missing_ok=True)
        said = run(*arguments)
        text = script.read_text() if script.exists() else ""
        options = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", text, re.MULTILINE))
        options["image"] = (re.findall(r"enroot import .*docker://(?:nvcr.io#)?([^ ']+)", text) or [""])[0]
        options["mounts"] = (re.findall(r"--container-mounts=(\S+)", text) or [""])[-1]
        return said, options, text

    return submitted


@pytest.mark.parametrize(
    ("command", "image", "nodes", "gpus", "tasks"),
    [
        ("super3 data prep rl", RAY, "1", None, "1"),
        ("super3 rl rlvr -c rlvr1", SUPER3, "109", "8", "8"),
        ("super3 rl rlvr -c test", SUPER3, "1", "1", "1"),
        ("super3 rl swe2", SWE, "64", "8", "8"),
        ("super3 rl rlhf", SUPER3, "72", "8", "8"),
        ("nano3 rl", NANO3, "32", "8", "8"),
    ],
)
def test_the_pages_profile_carries_every_command_of_the_pages(
    submitted: Any, workplace: Path, command: str, image: str, nodes: str, gpus: str | None, tasks: str
) -> None:
    prompts = workplace.parent / "prompts.jsonl"
    prompts.write_text(PROMPT)
    given = [] if " prep " in command else ["--input", f"prompts={prompts}", "--input", "policy=nvidia/a-model"]
    said, options, script = submitted(*command.split(), "--batch", "YOUR-CLUSTER", *given)
    assert said.code == 0, said.err
    assert (options["image"], options["nodes"], options.get("gpus-per-node")) == (image, nodes, gpus)
    assert (options["ntasks-per-node"], options["account"], options["partition"]) == (tasks, "YOUR-ACCOUNT", "batch")
    assert (options["mem"], "#SBATCH --exclusive" in script) == ("0", True)
    mounts = options["mounts"].split(",")
    own = (workplace / "home", workplace, workplace / "env.toml")
    assert mounts[:4] == ["/lustre:/lustre", *(f"{path}:{path}" for path in own)]
    assert (f"{prompts}:{prompts}" in mounts) is bool(given)
    assert re.search(rf"{nodes} nodes?(, GPUs per node: {gpus})?, image \S*{re.escape(image)}\)", said.out)


@pytest.mark.parametrize(
    ("lines", "words", "expected"),
    [
        ("", "run.env.nodes=110", {"nodes": "110", "image": SUPER3}),
        ("", "cluster.num_nodes=21 policy.generation.colocated.generation_devices=64", {"nodes": "21"}),
        (
            "",
            "run.env.container=mine/image:1 run.env.ntasks_per_node=1",
            {"image": "mine/image:1", "ntasks-per-node": "1"},
        ),
        ("", "run.env.nodez=2", "a config has container, nodes"),
        ("", "run.env.nodes=50", "hint: cluster.num_nodes=50"),
        ("", "run.env.sandbox.port=1", "code runs in this project's own sandbox"),
        ("", "run.env.time=1:00:00", "env.toml the rest"),
        ('container = "mine/image:2"', "", {"image": "mine/image:2", "nodes": "109"}),
        ('container_image = "mine/image:2"', "run.env.container=other:3", {"image": "other:3"}),
        ('container_image = ""', "", {"image": "", "mounts": "", "nodes": "109"}),
        ("gpus_per_node = 4", "", "cluster.gpus_per_node of at most 4"),
    ],
)
def test_the_config_the_profile_and_the_command_line_say_what_a_job_is(
    submitted: Any, workplace: Path, lines: str, words: str, expected: Any
) -> None:
    text = PAGE.replace("gpus_per_node = 8\n", "") if "gpus" in lines else PAGE
    (workplace / "env.toml").write_text(f"{text}{lines}\n")
    (workplace / "p.jsonl").write_text(PROMPT)
    inputs = ("--input", "prompts=p.jsonl", "--input", "policy=nvidia/a-model")
    said, options, _ = submitted("super3", "rl", "rlvr", "-c", "rlvr1", "-b", "YOUR-CLUSTER", *inputs, *words.split())
    if isinstance(expected, str):
        assert said.code == 2 and expected in said.err and not options.get("nodes")
    else:
        assert said.code == 0, said.err
        assert {key: options.get(key) for key in expected} == expected
        out = " ".join(said.out.split())
        idle = "run.env.nodes=110: rl/nemo_rl/rlvr works on 109 of them, its cluster.num_nodes"
        assert (idle in out) is (expected.get("nodes") == "110")
        assert f"has {options['nodes']} nodes, as its steps say, and not the 2 of [YOUR-CLUSTER]" in out


def test_stages_of_several_images_are_no_one_job_unless_the_profile_names_one(submitted: Any, workplace: Path) -> None:
    refused, _, _ = submitted("steps", "run", "super3_rl", "-d", "-r", "YOUR-CLUSTER")
    assert refused.code == 2 and f"nvcr.io/{SUPER3}, nvcr.io/{SWE}" in refused.err
    typed, _, _ = submitted("steps", "run", "super3_rl", "-d", "-r", "YOUR-CLUSTER", "rlvr1.run.env.container=mine:1")
    assert typed.code == 0 and "container_image: mine:1" in typed.out
    line = re.search(r"hint: (sed .*_swe\"' \S+)", refused.err)
    assert line is not None and os.system(line[1]) == 0
    shown, _, _ = submitted("steps", "run", "super3_rl", "-d", "-r", "YOUR-CLUSTER")
    assert shown.code == 0 and f"container_image: nvcr.io/{SWE}" in shown.out and "nodes: 109" in shown.out


@pytest.mark.parametrize(
    ("profile", "what"),
    [
        ('executor = "slurm"\nmounts = ["/a:/a"]', "needs an image for its mounts, and"),
        ('executor = "docker"', "needs an image, and"),
    ],
    ids=["slurm", "docker"],
)
def test_a_job_without_the_image_that_it_needs_is_refused_with_the_line_to_add(
    cli: Cli, workplace: Path, profile: str, what: str
) -> None:
    (workplace / "env.toml").write_text(f"[there]\n{profile}\n")
    refused = cli("run", "toy/train", "-c", "tiny", "-b", "there")
    assert refused.code == 2 and what in refused.err and "found:    mounts" not in refused.err
    listed = cli("run", "toy/train", "-c", "tiny", "-b", "there", "-d")
    assert listed.code == 0 and "to be filled in before it can run: 1" in listed.out and "needs an image" in listed.out
    line = re.search(r"hint: (sed .*)", cli("plan", "toy/train", "-c", "tiny", "-r", "there").err)
    assert line is not None and os.system(line[1]) == 0
    shown = cli("run", "toy/train", "-c", "tiny", "-b", "there", "-d")
    assert shown.code == 0 and "container_image: nemotron-steps:cuda" in shown.out
    assert cli("runs", "--json").json == []


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ('nodes = 109\ntime = "04:00"', "up to 109 nodes × 8 GPUs × 4 h = 3,488 GPU-hours"),
        ('time = "1-00:00"\nrequeue = 1', "up to 1 node × 8 GPUs × 48 h = 384 GPU-hours"),
        ("nodes = 2", "2 nodes × 8 GPUs, hours unknown: set time in [there]"),
    ],
)
def test_a_plan_says_what_its_job_takes_of_a_cluster(cli: Cli, workplace: Path, keys: str, said: str) -> None:
    (workplace / "env.toml").write_text(f'[there]\nexecutor = "slurm"\ngpus_per_node = 8\n{keys}\n')
    for command in (
        ("plan", "toy/train", "-c", "tiny", "-r", "there"),
        ("run", "toy/train", "-c", "tiny", "-b", "there", "-d"),
    ):
        assert said in cli(*command).out


@pytest.mark.parametrize(
    ("words", "answer", "is_submitted"), [((), "n", False), ((), "", False), ((), "y", True), (("--yes",), "", True)]
)
def test_many_gpu_hours_are_asked_about_on_a_terminal(
    submitted: Any, workplace: Path, words: tuple[str, ...], answer: str, is_submitted: bool
) -> None:
    (workplace / "env.toml").write_text('[big]\nexecutor = "slurm"\nnodes = 4\ngpus_per_node = 8\ntime = "04:00"\n')
    child, terminal = pty.fork()
    if child == 0:
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
        os._exit(steps(["run", "toy/train", "-c", "tiny", "-b", "big", *words]))
    os.write(terminal, f"{answer}\n".encode())
    printed = b""
    while more := _read(terminal):
        printed += more
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (0 if is_submitted else 130)
    assert (workplace.parent / "job.sh").exists() == is_submitted
    assert ("submit? [y/N]" in printed.decode()) == (not words)


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # its other end is closed
        return b""
