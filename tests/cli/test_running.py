from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from unittest.mock import Mock

import pytest

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import JudgeUnavailableError, RequestError, StorageError
from nemotron_steps.runs.run_folder import RunFolder
from nemotron_steps.session.run import _Journal, request_of_run
from nemotron_steps.session.run_request import RunRequest
from nemotron_steps.session.session import Session

COMMAND = [sys.executable, "-m", "nemotron_steps.cli.main"]


def test_a_run_shows_the_plan_works_and_says_what_improved(cli, workplace):
    result = cli("run", "toy/train", "-c", "tiny")
    assert result.code == 0, result.err
    plan, _, rest = result.out.partition("\n\n")
    assert "toy/make" in plan
    assert "[toy/train] step 1: reward 0.3333  loss 1  kl 0.001" in rest
    assert "done in" in rest
    assert "held out reward  0.25 → 0.75  +0.5" in rest
    assert "toy/train/model:v1" in rest
    assert "steps run toy/convert --input model=toy/train/model:v1" in rest
    assert "reward_saturated" in rest
    assert "optimizer.lr=0.0333333" in rest


def test_a_second_run_is_a_no_op_that_says_so(cli):
    cli("run", "toy/train", "-c", "tiny")
    result = cli("run", "toy/train", "-c", "tiny")
    assert result.code == 0
    assert "nothing to do: all 2 steps are cached" in result.out
    assert "0.25 → 0.75" in result.out
    assert "nothing to do: cached  (" in cli("run", "toy/make", "count=3").out
    forced = cli("run", "toy/train", "-c", "tiny", "--force", "--json").json
    assert [step["state"] for step in forced["steps"]] == ["cached", "ran"]


def test_json_only_on_stdout(cli):
    result = cli("run", "toy/train", "-c", "tiny", "--json")
    run = result.json
    assert run["steps"][-1]["outputs"]["model"]["ref"] == "toy/train/model:v1"
    assert run["steps"][-1]["summary"]["held_out_reward"] == {"before": 0.25, "after": 0.75}
    assert run["report"] == f"{run['folder']}/report.html" and run["folder"].endswith(run["run"])
    assert [hint["name"] for step in run["steps"] for hint in step["hints"]] == ["reward_saturated"]
    assert run["seconds"] >= sum(step["seconds"] for step in run["steps"]) > 0
    failed = cli("run", "toy/train", "-c", "tiny", "end=judge", "--json")
    assert failed.code == 3
    assert failed.json["error"]["code"] == "E700"


@pytest.mark.parametrize(("end", "code"), [("diverge", 1), ("judge", 3), ("bug", 1), ("interrupt", 130)])
def test_exit_codes_and_the_way_on(cli, end, code):
    result = cli("run", "toy/train", "-c", "tiny", f"end={end}")
    assert result.code == code
    (run,) = cli("runs", "--json").json
    assert f"steps run --resume {run['id']}" in result.err


def test_a_bug_of_a_step_is_short_and_its_traceback_is_in_the_log(cli):
    result = cli("run", "toy/train", "-c", "tiny", "end=bug")
    assert "ZeroDivisionError" in result.err
    assert "Traceback" not in result.err
    log = cli("logs").out
    assert "Traceback" in log
    assert "a mistake of the step's author" in log


def test_resume_needs_only_the_run(cli):
    cli("run", "toy/train", "-c", "tiny", "end=interrupt", "optimizer.lr=0.4")
    (run,) = cli("runs", "--json").json
    assert run["status"] == "interrupted"
    result = cli("run", "--resume", run["id"])
    assert result.code == 130
    assert "optimizer.lr=0.4" in result.out
    (again,) = cli("runs", "--json").json
    assert again["attempts"] == 2
    assert "no run is called" in cli("run", "--resume", "nonsense").err


def test_a_forced_run_that_was_killed_is_resumed_by_its_id_alone(cli, workplace):
    asked = ("run", "toy/train", "-c", "tiny", "seconds_per_step=0.3")
    cli(*asked)
    command = [*COMMAND, *asked, "--force"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=workplace)
    assert process.stdout is not None
    for line in process.stdout:
        if "[toy/train] started" in line:
            break
    process.kill()
    process.communicate(timeout=30)
    run = cli("status", "--json").json
    while run["status"] == "running":  # a step's process, which holds the run's lock too, ends a moment later
        time.sleep(0.1)
        run = cli("status", "--json").json
    assert run["status"] == "killed" and list(run["forced"]) == ["toy/train"]
    planned = cli("run", "--resume", run["id"], "-d", "--json").json
    assert [step["cached"] is None for step in planned["steps"]] == [False, True]
    resumed = cli("run", "--resume", run["id"])
    assert resumed.code == 0 and "1 cached" in resumed.out and "nothing to do" not in resumed.out
    again = cli("run", "--resume", run["id"])
    assert "nothing to do" in again.out


@pytest.mark.parametrize(
    ("request_", "found"),
    [
        ({"targets": "toy/train"}, "`targets` must be a list of strings"),
        ({"overrides": []}, "`targets` names no step"),
        ({"targets": ["toy/train"], "inputs": {"a": 1}}, "`inputs`"),
        ({"targets": ["toy/train"], "config": 3}, "`config`"),
    ],
)
def test_a_run_whose_request_is_malformed_is_not_resumed_by_its_id_alone(cli, workplace, request_, found):
    cli("run", "toy/train", "-c", "tiny", "end=interrupt")
    (file,) = workplace.rglob("run.json")
    record = json.loads(file.read_text())
    file.write_text(json.dumps({**record, "request": request_}))
    result = cli("run", "--resume", record["id"])
    assert result.code == 2
    assert found in result.err and f"steps run STEP -c CONFIG --resume {record['id']}" in result.err


def test_a_home_that_cannot_be_used_is_one_message(cli, workplace):
    (workplace / "file").write_text("")
    for command in (("runs",), ("run", "toy/make")):
        result = cli(*command, "--home", str(workplace / "file"))
        assert result.code != 0
        assert "the home is not a folder" in result.err
        assert "Traceback" not in result.err
    nowhere = cli("run", "toy/make", "--home", "/proc/home")  # /proc takes no new folders, from root neither
    assert "the home cannot be written" in nowhere.err
    assert "--home DIR" in nowhere.err


def test_a_run_that_was_given_a_secret_is_gone_on_with_as_the_hint_says(cli, workplace):
    (workplace / "env.toml").write_text("[here]\n[other]\n")
    given = ("toy/train", "-c", "tiny", "judge.api_key=hunter2hunter2")
    cli("run", *given, "end=interrupt", "-r", "here", "--", "--flag")
    (info,) = cli("runs", "--json").json
    refused = cli("run", "--resume", "latest").err
    hint = refused.partition(f"hint: steps run --resume {info['id']} ")[2].partition("   # with the secret again")[0]
    assert hint.startswith("-r here toy/train -c tiny ") and hint.endswith(" -- --flag"), refused
    assert f"--resume {info['id']} -r other toy/train" in cli("run", "--resume", "latest", "-r", "other").err
    words = [word.replace("end=interrupt", "end=done") for word in shlex.split(hint)]
    again = cli("run", "--resume", info["id"], *(given[-1] if "api_key" in word else word for word in words))
    assert again.code == 0, again.err


def test_a_secret_is_not_kept_so_it_is_asked_for_again(cli, workplace):
    cli("run", "toy/train", "-c", "tiny", "end=interrupt", "judge.api_key=hunter2hunter2")
    result = cli("run", "--resume", "latest")
    assert result.code == 2
    assert "was given a secret" in result.err
    for path in (workplace / "home").rglob("*"):
        if path.is_file():
            assert b"hunter2" not in path.read_bytes(), path
    for path in (workplace.parent / "cache").rglob("*.json"):
        assert b"hunter2" not in path.read_bytes(), path


def test_what_libraries_print_never_reaches_the_json(workplace):
    code = (
        "import os, sys, toy_steps\n"
        "from nemotron_steps.cli.main import steps\n"
        "make = toy_steps.make\n"
        "def noisy(context):\n"
        "    os.write(1, b'from C\\n')\n"
        "    make(context)\n"
        "toy_steps.make = noisy\n"
        "sys.exit(steps(['run', 'toy/make', '--json']))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert json.loads(result.stdout)["steps"][0]["state"] == "ran"
    assert "from C" in result.stderr
    assert "a library that prints" in result.stderr


def test_a_local_profile_sets_its_variables(cli, workplace, monkeypatch):
    monkeypatch.setenv("TOY_JUDGE", "from-outside")
    (workplace / "env.toml").write_text('[here]\nenv_vars = { TOY_JUDGE = "judges/from-profile" }\n')
    shown = cli("run", "toy/train", "-c", "tiny", "-r", "here", "-d", "--json").json
    assert shown["configs"]["toy/train"]["judge"]["model"] == "judges/from-profile"


def test_run_and_batch_refuse_each_other(cli, workplace):
    (workplace / "env.toml").write_text('[here]\n[far]\nexecutor = "slurm"\n')
    both = cli("run", "toy/make", "-r", "here", "-b", "here")
    assert both.code == 2
    assert "give one of them" in both.err
    cli("run", "toy/train", "-c", "tiny", "end=interrupt")
    assert "give one of them" in cli("run", "--resume", "latest", "-r", "here", "-b", "here").err
    assert cli("run", "toy/make", "-r", "here").code == 0
    assert cli("run", "toy/make", "-r", "nowhere").code == 2
    assert "--force-squash" in cli("run", "toy/make", "--force-squash").err
    assert "uses no container" in cli("run", "toy/make", "--force-squash", "-r", "here").err


def _wait(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.05)


def test_a_detached_run_is_followed_and_cancelled(cli, workplace):
    (workplace / "env.toml").write_text("[here]\n")
    submitted = cli("run", "toy/train", "-c", "tiny", "-b", "here", "seconds_per_step=20", "--json").json
    status = lambda: cli("status", submitted["run"], "--json").json  # noqa: E731
    _wait(lambda: status()["steps"].get("toy/train", {}).get("state") == "running")
    assert "cancel" in cli("status", submitted["run"]).out
    cancelled = cli("cancel", submitted["run"])
    assert cancelled.code == 0, cancelled.err
    assert status()["status"] == "interrupted"
    followed = cli("logs", submitted["run"], "-f")
    assert followed.code == 0
    assert "[toy/train] started" in followed.out
    assert "is not running" in cli("cancel", submitted["run"]).err


def test_a_detached_run_that_never_starts_is_reported(cli, workplace):
    (workplace / "env.toml").write_text("[here]\n")
    rows = workplace / "rows.jsonl"
    rows.write_text('{"number": 1}\n')
    (workplace / "mine.yaml").write_text("defaults: [tiny]\n")
    # The config is there when the run is submitted and gone when its process reads it.
    code = (
        "import subprocess, pathlib, sys\n"
        "from nemotron_steps.cli.main import steps\n"
        "popen = subprocess.Popen\n"
        "def start(*a, **k):\n"
        "    pathlib.Path('mine.yaml').unlink(missing_ok=True)\n"
        "    process = popen(*a, **k)\n"
        "    process.wait()\n"
        "    return process\n"
        "subprocess.Popen = start\n"
        "sys.exit(steps(['run', 'toy/train', '-c', './mine.yaml', '-b', 'here']))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
    result = cli("status", "latest")
    assert result.code == 2
    assert "ended before it started" in result.err
    assert "ended before it started" in cli("logs", "latest", "-f").err


def test_ctrl_c_leaves_a_resumable_run(workplace):
    command = [*COMMAND, "run", "toy/train", "-c", "tiny", "seconds_per_step=30"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=workplace)
    assert process.stdout is not None
    for line in process.stdout:
        if "[toy/train] started" in line:
            break
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "steps run --resume" in err
    assert "Traceback" not in err


def test_the_step_that_a_killed_run_was_at_is_shown_as_killed(cli, workplace):
    folder = RunFolder(ArtifactStore(workplace / "home"), "r1")
    steps = {"toy/make": {"state": "ran"}, "toy/train": {"state": "running"}, "toy/score": {"state": "pending"}}
    made = folder.create("toy/train", {})
    folder.update(made, status="running", host=socket.gethostname(), steps=steps)  # and nobody holds its lock
    shown = [line.split() for line in cli("status", "r1").out.splitlines()]
    assert [words[1] for words in shown[1:4]] == ["ran", "killed", "pending"]


def test_a_closed_pipe_is_no_error(workplace):
    command = f"{sys.executable} -m nemotron_steps.cli.main list | head -1"
    result = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, timeout=30)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    assert "BrokenPipe" not in result.stderr


@pytest.mark.parametrize(
    "command", ["list", "list --json", "--version", "--help", "", "list --help", "run --help", "env list --help"]
)
def test_an_output_that_is_full_is_one_error_and_no_traceback(workplace, command):
    command = f"{sys.executable} -m nemotron_steps.cli.main {command}"
    result = subprocess.run(["bash", "-c", f"{command} > /dev/full"], capture_output=True, text=True, timeout=30)
    assert result.returncode == StorageError.exit_code
    assert result.stderr.startswith("error[E610]: writing failed: No space left on device\n  --> standard output\n")
    assert "Traceback" not in result.stderr and "Exception ignored" not in result.stderr
    silent = subprocess.run(["bash", "-c", f"{command} > /dev/full 2>&1"], timeout=30, check=False)
    assert silent.returncode != 0


def test_status_and_report(cli):
    cli("run", "toy/train", "-c", "tiny")
    shown = cli("status").out
    assert "0.25 → 0.75" in shown
    assert "reward 1" in shown
    status = cli("status", "--json").json
    assert status["metrics"]["toy/train"]["index"] == 3
    report = cli("report", "--json").json["report"]
    assert report.endswith("report.html")
    assert "toy/train" in cli("runs").out
    assert cli("runs", "--limit", "1", "--json").json[0]["status"] == "done"
    failed = cli("run", "toy/train", "-c", "tiny", "end=judge")
    assert failed.code == 3
    assert "error[E700]" in cli("status").out
    assert [run["status"] for run in cli("runs", "--json").json] == ["done", "failed"]
    assert [run["status"] for run in cli("runs", "--limit", "1", "--json").json] == ["failed"]


def test_artifacts(cli, workplace):
    cli("run", "toy/train", "toy/score", "-c", "tiny")
    assert "toy/train/model:v1" in cli("artifacts", "list").out
    listed = cli("artifacts", "list", "--type", "toy_data", "--json").json
    assert [artifact["ref"] for artifact in listed] == ["toy/make/rows:v1"]
    shown = cli("artifacts", "show", "toy/train/model").out
    assert "toy_model" in shown
    assert "rows = toy/make/rows:v1" in shown
    lineage = cli("artifacts", "lineage", "toy/score/score").out.splitlines()
    assert lineage[1].startswith("└── toy/convert/export:v1")
    assert lineage[3].startswith("        └── toy/make/rows:v1")
    assert "used by" in cli("artifacts", "lineage", "toy/make/rows").out
    assert cli("artifacts", "verify").code == 0
    path = workplace / "home" / "artifacts" / "objects"
    model = next(folder for folder in path.iterdir() if (folder / "model.json").is_file()) / "model.json"
    model.chmod(0o644)
    model.write_text(model.read_text().replace("0.1", "0.2"))
    corrupt = cli("artifacts", "verify")
    assert corrupt.code == 2
    assert "✗ toy/train/model:v1" in corrupt.out
    assert json.loads(cli("artifacts", "verify", "--json").out)
    assert cli("artifacts", "show", "toy/trian/model").code == 2


def test_a_missing_package_is_told_before_anything_runs(cli, monkeypatch):
    monkeypatch.setattr("nemotron_steps.runs.prerequisites.version", Mock(side_effect=PackageNotFoundError))
    command = ("run", "rl/nemo_rl/rlvr", "-c", "tiny", "cluster.backend=ray", "policy.generation.backend=vllm")
    result = cli(*command)
    assert result.code == 2
    assert "rl/nemo_rl/rlvr needs ray, which is not usable here" in result.err
    assert "--> policy.generation.backend=vllm" in result.err
    assert "pip install 'nemotron-steps[ray]'" in result.err
    assert "-c cpu" not in result.err
    assert cli("runs", "--json").json == []
    planned = cli("plan", *command[1:])  # which may be for another machine
    assert planned.code == 0 and "will need ray, for rl/nemo_rl/rlvr" in planned.out


def _task(**changes):
    row = {
        "responses_create_params": {"input": [{"role": "user", "content": "2+3="}]},
        "question": "2+3=",
        "answer": "5",
        "metadata": {"source_dataset": "basic_arithmetic", "source_index": 0},
        "agent_ref": {"type": "responses_api_agents", "name": "reasoning_gym_simple_agent"},
    }
    return json.dumps({**row, **changes}) + "\n"


@pytest.mark.parametrize(
    ("train", "told"),
    [
        (_task() * 100 + _task(metadata={}), "train.jsonl:101"),
        (_task(), "1 prompts are fewer than one step needs"),
        (_task() * 100 + _task(agent_ref={"name": "no_such_env"}), "no_such_env"),
    ],
    ids=["row without its environment's fields", "too few rows", "unknown environment"],
)
def test_prompts_that_cannot_be_used_are_told_before_any_step_runs(cli, tmp_path, train, told):
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "train.jsonl").write_text(train)
    result = cli("run", "rl/nemo_rl/rlvr", "-c", "tiny", "--input", f"prompts={tmp_path / 'prompts'}")
    assert result.code == 2
    assert told in result.err
    assert cli("runs", "--json").json == []


def test_what_a_run_was_asked_for_is_asked_again_with_more_checks_left_out(workplace):
    store = ArtifactStore(workplace / "home")
    first = RunRequest(("toy/train",), profile="one", ignore_checks=("score",))
    RunFolder(store, "r1").create("toy/train", first.to_dict())
    bench = Session(None)
    assert request_of_run(bench, "r1") == first
    again = request_of_run(bench, "r1", profile="two", ignore_checks=["train"])
    assert again == replace(first, profile="two", ignore_checks=("score", "train"))


def test_how_to_go_on_is_said_where_there_is_something_to_go_on_from_and_once():
    def hints(*kinds, error=RequestError, known=()):
        seen, failure = _Journal("home"), error("x", hints=known)
        for kind in kinds:
            seen({"kind": kind, "run": "r1"})
        return (*known, *seen.hints(failure))

    log, resume = "steps logs r1", "steps run --resume r1"
    assert hints() == () and hints("run_started", "step_started") == (log,)
    for kind in ("metrics", "step_finished"):
        assert hints("run_started", kind) == (log, resume)
    assert hints("run_started", error=JudgeUnavailableError) == (log, resume)
    own = f"{resume} toy/train --ignore-checks train"
    assert hints("run_started", "metrics", known=(own,)) == (own, log)
