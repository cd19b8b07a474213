"""`steps run`: what it shows, keeps, resumes and accepts."""

import json
import os
import shutil
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from unittest.mock import Mock

import pytest

from nemotron_steps import __version__
from nemotron_steps.errors import StorageError
from tests.cli.conftest import TOY_PACK, Cli


def test_a_run_shows_the_plan_works_and_says_what_improved(cli, workplace):
    result = cli("run", "toy/train", "-c", "tiny")
    assert result.code == 0, result.err
    plan, _, rest = result.out.partition("\n\n")
    assert "toy/make" in plan
    assert "[toy/train] step 1: reward 0.3333  loss 1  kl 0.001" in rest
    assert "done in" in rest
    assert "held out reward  0.25 → 0.75  +0.5" in rest
    assert "toy/train/model:v1" in rest
    assert "steps artifacts lineage toy/train/model:v1" in rest
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


def test_runs_are_listed_with_their_names_overrides_and_what_became_of_their_main_metric(cli):
    for name, seed in (("a", 1), ("a", 2), ("b", 3)):
        assert cli("run", "toy/train", "-c", "tiny", "--name", name, f"seed={seed}").code == 0
    rows = [line.split("  ") for line in cli("runs", "--limit", "2").out.splitlines()]
    assert [(row[0], *row[-2:]) for row in rows] == [
        ("a", "held out reward 0.25 → 0.75", "toy/train -c tiny seed=2"),
        ("b", "held out reward 0.25 → 0.75", "toy/train -c tiny seed=3"),
    ]
    listed = cli("runs", "--json").json
    metric = {"name": "held_out_reward", "before": 0.25, "after": 0.75}
    asked = [(run["run_name"], run["overrides"], run["metric"]) for run in listed]
    assert asked == [("a", ["seed=1"], metric), ("a", ["seed=2"], metric), ("b", ["seed=3"], metric)]
    assert cli("run", "--resume", "a", "--json").json["run"] == listed[1]["id"]
    assert "alone goes on" in cli("run", "--resume", "a", "--name", "c").err


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


def test_a_missing_package_is_told_before_anything_runs(cli, monkeypatch):
    monkeypatch.setattr("nemotron_steps.runs.prerequisites.version", Mock(side_effect=PackageNotFoundError))
    result = cli("run", "rl/nemo_rl/rlvr", "-c", "tiny", "cluster.backend=ray", "policy.generation.backend=vllm")
    assert result.code == 2
    assert "rl/nemo_rl/rlvr needs ray, which is not usable here" in result.err


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
    assert os.getsid(status()["pid"]) != os.getsid(0)  # it outlives the terminal that it was typed in
    assert "cancel" in cli("status", submitted["run"]).out
    cancelled = cli("cancel", submitted["run"])
    assert cancelled.code == 0, cancelled.err
    assert status()["status"] == "interrupted"
    followed = cli("logs", submitted["run"], "-f")
    assert followed.code == 0
    assert "[toy/train] started" in followed.out
    assert "is not running" in cli("cancel", submitted["run"]).err


@pytest.mark.parametrize("command", ["list", "--help"])
def test_an_output_that_is_full_is_one_error_and_no_traceback(workplace, command):
    command = f"{sys.executable} -m nemotron_steps.cli.main {command}"
    result = subprocess.run(["bash", "-c", f"{command} > /dev/full"], capture_output=True, text=True, timeout=30)
    assert result.returncode == StorageError.exit_code
    assert result.stderr.startswith("error[E610]: writing failed: No space left on device\n  --> standard output\n")
    assert "Traceback" not in result.stderr and "Exception ignored" not in result.stderr
    silent = subprocess.run(["bash", "-c", f"{command} > /dev/full 2>&1"], timeout=30, check=False)
    assert silent.returncode != 0


CHAIN = ("toy/train", "-c", "tiny")


@pytest.fixture
def pack(cli: Cli, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The toy steps in a folder of their own, run once."""
    folder = Path(shutil.copytree(TOY_PACK, workplace / "pack"))
    monkeypatch.setenv("STEPS_PATH", str(folder))
    spec = spec_from_file_location("toy_steps", folder / "toy_steps.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "toy_steps", module)
    spec.loader.exec_module(module)
    assert cli("run", *CHAIN).code == 0
    return folder


def edit(pack: Path) -> None:
    with (pack / "toy_steps.py").open("a") as file:
        file.write("\n")


def states(cli: Cli, *words: str) -> list[bool]:
    return [step["cached"] is not None for step in cli("plan", *CHAIN, *words, "--json").json["steps"]]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--home", "another"), False, {"toy/train": "no earlier result"}),
        (("optimizer.lr=0.5",), False, {"toy/train": "config optimizer.lr: 0.1 -> 0.5"}),
        (("seed=3",), True, {"toy/make": "code: toy_steps.py", "toy/train": "config seed: null -> 3"}),
        (("--force",), False, {"toy/train": "--force"}),
    ],
)
def test_why_says_what_changed(cli: Cli, pack: Path, workplace: Path, words: tuple[str, ...], code: bool, said) -> None:
    if code:
        edit(pack)
    shown = cli("plan", *CHAIN, *words, "--why").out
    for step, line in said.items():
        assert line in shown.rpartition(f" {step} ")[2], shown
    assert ("made by 0.1.0, changed: toy_steps.py" in shown) is code
    assert ("--accept toy/make" in shown) is code


def test_what_only_changed_code_would_make_again_is_accepted_on_request(cli: Cli, pack: Path, workplace: Path) -> None:
    cli("run", *CHAIN, "optimizer.lr=0.5")
    edit(pack)
    assert states(cli) == [False, False]
    told = "made by 0.1.0, changed: toy_steps.py"
    ran = cli("run", *CHAIN, "--accept", "toy/make", "--accept", "toy/train")
    assert ran.code == 0 and "nothing to do" in ran.out and told in ran.out
    assert states(cli) == [True, True] and states(cli, "optimizer.lr=0.5") == [True, False]
    model = cli("artifacts", "show", "toy/train/model", "--json").json
    producer = model["producer"]
    (accepted,) = producer["accepted"]
    assert producer["package"] == cli("status", "latest", "--json").json["version"] == __version__
    assert f"nemotron-steps {__version__}" in cli("artifacts", "show", "toy/train/model").out
    assert accepted["by"] and accepted["key"] != producer["cache_key"]
    assert accepted["changed"] == ["toy_steps.py"]
    told_by = [cli("artifacts", "lineage", "toy/train/model", *words).out for words in ((), ("--json",))]
    assert told_by[0].count(told) == 2 and '"accepted": "by ' in told_by[1].partition("ancestors")[0]
    assert cli("artifacts", "list").out.count(", accepted)") == 2
    assert json.loads(Path(model["path"], "model.json").read_text())["lr"] == 0.1  # of the two, the one asked for
    edit(pack)
    planned = cli("plan", *CHAIN, "--why").out
    assert told in planned and f"code: {told.partition('changed: ')[2]}" in planned
    assert cli("plan", *CHAIN, "--accept", "toy/make", "--accept", "toy/train").code == 0
    assert told in cli("artifacts", "show", "toy/train/model").out
    again = cli("artifacts", "show", "toy/train/model", "--json").json["producer"]["accepted"]
    assert [each["key"] for each in again] == [accepted["key"], producer["cache_key"]]
    assert cli("artifacts", "verify").code == 0


@pytest.mark.parametrize(
    ("words", "why", "hint"),
    [
        (("--accept", "toy/trian"), "no step of the plan", "--accept toy/train"),
        (("--accept", "toy/train", "edited"), "it reads what toy/make makes", "--accept toy/make --accept toy/train"),
    ],
)
def test_nothing_to_accept_is_an_error(cli: Cli, pack: Path, words: tuple[str, ...], why: str, hint: str) -> None:
    if "edited" in words:
        edit(pack)
    refused = cli("plan", *CHAIN, *(word for word in words if word != "edited"))
    assert refused.code == 2 and why in refused.err and f"hint: {hint}" in refused.err
    assert "accepted" not in cli("artifacts", "show", "toy/train/model", "--json").out
