"""The container files: what they copy and call is there; and the launch script."""

import importlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.cli.parser import build
from tests.models.checkpoints import write_checkpoint

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted((ROOT / "containers").glob("Dockerfile.*"))
LAUNCH = ROOT / "examples" / "super_launch.sh"


def instructions(file: Path) -> list[tuple[str, str]]:
    """(word, rest) of each instruction, continued lines joined, comments left out."""
    text = re.sub(r"^\s*#.*\n", "", file.read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines) if word]


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_a_dockerfile_is_well_formed_and_copies_what_is_there(file: Path) -> None:
    found = instructions(file)
    words = [word for word, _ in found]
    assert set(words) <= {"ARG", "FROM", "ENV", "RUN", "WORKDIR", "COPY", "CMD", "SHELL"}
    assert words[0] in ("FROM", "ARG") and words.count("FROM") == 1
    for word, rest in found:
        if word == "FROM":
            assert re.search(r":[\w.-]+$|^\$\{BASE\}$", rest) and not rest.endswith(":latest")
        if word == "COPY":
            *sources, _ = rest.split()
            assert [source for source in sources if not (ROOT / source).exists()] == []
        if word == "RUN":
            assert subprocess.run(["bash", "-n"], input=rest, text=True).returncode == 0, rest
            assert "apt-get install" not in rest or ("rm -rf" in rest and "--no-install-recommends" in rest)


def test_images_install_the_versions_and_extras_the_project_names() -> None:
    makefile, project = (ROOT / "Makefile").read_text(), (ROOT / "pyproject.toml").read_text()
    cpu, cuda = ((ROOT / "containers" / f"Dockerfile.{kind}").read_text() for kind in ("cpu", "cuda"))
    torch = re.search(r"torch==[\d.]+", makefile)
    vllm = re.search(r'^vllm = \["(.*)"\]', project, re.MULTILINE)
    assert torch is not None and torch[0] in cpu
    assert vllm is not None and f"'{vllm[1]}'" in cuda
    extras = tomllib.loads(project)["project"]["optional-dependencies"]
    for text in (cpu, cuda):  # public blends point to questions in Parquet files; env.toml may ask for either mirror
        found = re.search(r"'\.\[([\w,]+)\]'", text)
        assert found is not None
        assert {"data", "tensorboard", "wandb"} <= set(found[1].split(",")) <= set(extras)


def test_what_an_image_calls_of_this_project_is_there() -> None:
    """`steps` and its commands, and what Python is made to import."""
    for file in [*DOCKERFILES, ROOT / "containers" / "apptainer.def"]:
        text = file.read_text()
        said = [json.loads(rest) for word, rest in instructions(file) if word == "CMD"]
        said += [["steps", word] for word in re.findall(r"^ *(?:&& )?steps ([a-z-]+)", text, re.MULTILINE)]
        assert said
        for program, *words in said:
            assert program == "steps"
            build("steps").parse_args(words)  # UsageError for a command that is not there
        for program in re.findall(r'python -c "(.*?)"', text):
            names = re.findall(r"from (nemotron_steps[\w.]*) import ([\w, ]+)", program)
            assert names
            for module, imported in names:
                there = vars(importlib.import_module(module))
                assert {name.strip() for name in imported.split(",")} <= set(there)


@pytest.mark.parametrize(
    ("linter", "files"),
    [
        ("hadolint", DOCKERFILES),
        ("shellcheck", [LAUNCH, ROOT / ".ci" / "run", *sorted((ROOT / "scripts").glob("*.sh"))]),
    ],
)
def test_a_linter_has_nothing_to_say(linter: str, files: list[Path]) -> None:
    program = shutil.which(linter, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None and not os.environ.get("CI"):
        pytest.skip(f"{linter} is not installed: make setup-test")
    found = subprocess.run([str(program), *map(str, files)], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


VARIABLES = {
    "EXP_NAME": "stage1.1-rlvr1",
    "CONFIG_PATH": "examples/configs/super/stage1_rlvr.yaml",
    "MODEL_PATH": "/path/to/sft_checkpoint",
    "TRAIN_PATH": "/data/rlvr1/train-split.jsonl",
    "VAL_PATH": "/data/rlvr1/val-split.jsonl",
    "CONTAINER": "nvcr.io/nvidia/nemo-rl:v0.5.0.nemotron_3_super",
    "SANDBOX_CONTAINER": "../images/sandbox.sif",
    "PERSISTENT_CACHE": "/lustre/cache",
    "EXTRA_MOUNTS": " /lustre:/lustre, /data:/elsewhere",
    "SIF_DIR": "",
    "SLURM_PARTITION": "batch",
    "SLURM_ACCOUNT": "research",
}
ROW = {
    "responses_create_params": {"input": [{"role": "user", "content": "1 + 1?"}]},
    "expected_answer": "2",
    "agent_ref": {"name": "math_with_judge_simple_agent"},
    "question": "1 + 1?",
}


def launch(tmp_path: Path, *words: str, **changed: str) -> subprocess.CompletedProcess[str]:
    """What the script and the command that it becomes say, in a folder `work` beside `images`."""
    for folder in ("bin", "work", "images"):
        (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / "images" / "sandbox.sif").write_text("image")
    nemotron = tmp_path / "bin" / "nemotron"
    nemotron.write_text(
        f"#!{sys.executable}\nimport sys\nfrom nemotron_steps.cli.main import nemotron\nsys.exit(nemotron())\n"
    )
    nemotron.chmod(nemotron.stat().st_mode | stat.S_IXUSR)
    environment = {
        **os.environ,
        "PATH": f"{nemotron.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "STEPS_HOME": str(tmp_path / "home"),
        **VARIABLES,
        **changed,
    }
    command = ["bash", str(LAUNCH), *words]
    return subprocess.run(command, env=environment, cwd=tmp_path / "work", capture_output=True, text=True)


def profile_of(tmp_path: Path) -> dict[str, Any]:
    return tomllib.loads((tmp_path / "home" / "launch" / "stage1.1-rlvr1.toml").read_text())["super_launch"]


def test_a_stage_is_launched_by_environment_variables(tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b" / "train.jsonl").write_text(f"{json.dumps(ROW)}\n")
    found = launch(tmp_path, "--dry-run", "grpo.seed=7", TRAIN_PATH="../a b/train.jsonl")
    assert found.returncode == 0, found.stderr
    assert "no file here: the built-in config, nemotron super3 rl rlvr -c default\n" in found.stderr
    assert "rl/nemo_rl/rlvr -c rlvr1" in found.stdout and "num_nodes: 109" in found.stdout
    assert "/data/rlvr1/val-split.jsonl" in found.stdout and "seed: 7" in found.stdout
    assert found.stdout.count(f"sandbox_image: {tmp_path}/images/sandbox.sif") == 3
    assert profile_of(tmp_path) == {
        "executor": "slurm",
        "job_name": "stage1.1-rlvr1",
        "account": "research",
        "partition": "batch",
        "exclusive": True,
        "container_image": VARIABLES["CONTAINER"],
        "mounts": ["/lustre:/lustre", "/data:/elsewhere", "/lustre/cache:/lustre/cache"],
        "env_vars": {
            "XDG_CACHE_HOME": "/lustre/cache",
            "VLLM_CACHE_ROOT": "/lustre/cache/vllm",
            "FLASHINFER_WORKSPACE_BASE": "/lustre/cache/flashinfer",
        },
    }


GENRM = "env: {nemo_gym: {num_gpu_nodes: 0, environments: {genrm_compare: {}}}}"
CONFIGS = [
    # CONFIG_PATH, what the file says (None: there is none), what the plan says
    ("examples/configs/super/stage2_swe2.yaml", None, "rl/nemo_rl/swe -c swe2"),
    ("stage3_rlhf/config/small.yaml", None, "rl/nemo_rl/rlhf -c small"),
    ("stage1_rlvr.yaml", "defaults: [swe1]\ngrpo: {seed: '${mul:617,2}'}\n", "rl/nemo_rl/swe -c"),
    ("a b.yaml", f"defaults: [tiny]  # rlvr1\n{GENRM}\n", "rl/nemo_rl/rlhf -c"),
    ("rlhf/config.txt", "defaults:\n  - rlvr2\ncheckpointing: {metric_name: swe1}\n", "rl/nemo_rl/rlvr -c"),
]


@pytest.mark.parametrize(("path", "text", "planned"), CONFIGS, ids=[path for path, *_ in CONFIGS])
def test_a_config_is_the_file_or_the_built_in_of_a_published_name(
    tmp_path: Path, path: str, text: str | None, planned: str
) -> None:
    file = tmp_path / "work" / path
    if text is not None:
        file.parent.mkdir(parents=True)
        file.write_text(text)
    found = launch(tmp_path, "-d", CONFIG_PATH=path, SANDBOX_CONTAINER="")
    assert found.returncode == 0, found.stderr
    assert planned in found.stdout
    if text is not None:
        assert f"{path} is read as a config of" in found.stderr and str(file.resolve()) in found.stdout
        assert f"{file.resolve().parent}:{file.resolve().parent}" in profile_of(tmp_path)["mounts"]
    if path == "stage1_rlvr.yaml":
        assert "CONFIG_PATH=stage1_rlvr is the built-in config" in found.stderr and "seed: 1234" in found.stdout


REFUSED = [
    ({"MODEL_PATH": "", "EXP_NAME": ""}, "super_launch.sh: set EXP_NAME MODEL_PATH\n"),
    ({"EXP_NAME": "../../x"}, "EXP_NAME=../../x must be a name"),
    ({"EXTRA_MOUNTS": "/a:/a, /lustre"}, "EXTRA_MOUNTS: '/lustre' must be HOST:CONTAINER, as in /lustre:/lustre"),
    ({"CONFIG_PATH": "/home/me/exp/stage3_rlhf.yaml"}, "CONFIG_PATH=/home/me/exp/stage3_rlhf.yaml is neither"),
    ({"CONFIG_PATH": "a.yaml"}, "CONFIG_PATH=a.yaml is neither a file nor a published config: stage1_rlvr.yaml, "),
    ({"SANDBOX_CONTAINER": "../images/none.sif"}, "SANDBOX_CONTAINER=../images/none.sif: there is no such file"),
    (
        {"VAL_PATH": "none.jsonl", "TRAIN_PATH": "rows:v1"},
        "there is no such file or folder here: MODEL_PATH=/path/to/sft_checkpoint VAL_PATH=none.jsonl\n",
    ),
]


@pytest.mark.parametrize(("changed", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_a_refusal_reaches_the_reader(tmp_path: Path, changed: dict[str, str], said: str) -> None:
    (tmp_path / "work").mkdir()
    there = {} if "VAL_PATH" in changed else dict.fromkeys(("MODEL_PATH", "TRAIN_PATH", "VAL_PATH"), ".")
    found = launch(tmp_path, **{"PERSISTENT_CACHE": "", **there, **changed})
    assert found.returncode == 2 and said in found.stderr


def test_a_job_is_submitted_that_sees_what_the_variables_name(tmp_path: Path) -> None:
    """A stand-in `sbatch` takes the job; its script has every path outside the working folder and the home."""
    for folder in ("bin", "configs", "a b"):
        (tmp_path / folder).mkdir()
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/sh\necho 42\n")
    (tmp_path / "bin" / "sbatch").chmod(0o755)
    (tmp_path / "configs" / "rlvr.yaml").write_text("defaults: [tiny]\n")
    (tmp_path / "image.sqsh").touch()
    write_checkpoint("qwen3", tmp_path / "model", max_position_embeddings=16384)
    for split in ("train", "val"):
        (tmp_path / "a b" / f"{split}.jsonl").write_text(f"{json.dumps(ROW)}\n" * 40)
    found = launch(
        tmp_path,
        CONFIG_PATH="../configs/rlvr.yaml",
        MODEL_PATH="../model",
        TRAIN_PATH="../a b/train.jsonl",
        VAL_PATH="../a b/val.jsonl",
        CONTAINER=str(tmp_path / "image.sqsh"),
        PERSISTENT_CACHE="../cache",
        SANDBOX_CONTAINER="",
    )
    assert found.returncode == 0 and "slurm job 42" in found.stdout, found.stderr
    (script,) = (tmp_path / "home" / "runs").glob("*/slurm.sh")
    for name in ("configs", "model", "a b", "cache"):
        assert f"{tmp_path}/{name}" in script.read_text(), name
    assert (tmp_path / "cache").is_dir()


def test_variables_that_do_nothing_are_told(tmp_path: Path) -> None:
    swe = launch(tmp_path, "-d", CONFIG_PATH="stage2_swe1.yaml", CONTAINER="", SIF_DIR="/sif")
    assert swe.returncode == 0, swe.stderr
    for said in ("SANDBOX_CONTAINER does nothing for swe1", "SIF_DIR does nothing for swe1"):
        assert said in swe.stderr
    assert "EXTRA_MOUNTS does nothing without CONTAINER" in swe.stderr and "mounts" not in profile_of(tmp_path)
    assert "container_image: ''" in swe.stdout and "nemotron_3_super_swe" not in swe.stdout
    registry = launch(tmp_path, "-d", SANDBOX_CONTAINER="nvcr.io/sandbox:1")
    assert registry.stdout.count("sandbox_image: docker://nvcr.io/sandbox:1") == 3
    assert "does nothing" not in registry.stderr
