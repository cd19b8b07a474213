"""The runner's parts by themselves: code digests, trackers, plain contexts, lines."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from nemotron_steps.artifacts.jsonable import plain
from nemotron_steps.errors import StepFailedError
from nemotron_steps.manifest.models import ErrorHint, StepManifest, StepTable
from nemotron_steps.runs.code_digest import Code, import_closure
from nemotron_steps.runs.context import plain_context
from nemotron_steps.runs.hints import hints_for_failure
from nemotron_steps.runs.log_format import render


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package `closurepack`: a → b → c, d named in a string, e unrelated."""
    root = tmp_path / "closurepack"
    (root / "sub").mkdir(parents=True)
    files = {
        "__init__.py": "",
        "a.py": "from closurepack.b import (\n    x,  # a comment, with commas\n    y,\n)\nimport json",
        "b.py": "x = 1\ndef y():\n    from .sub import c\n    return c",
        "sub/__init__.py": "from .h import i\nREGISTRY = {'d': 'closurepack.sub.d:Thing'}",
        "sub/c.py": "from . import f as g",
        "sub/d.py": "raise RuntimeError('must not be imported')",
        "sub/f.py": "",
        "sub/h.py": "i = 1",
        "e.py": "",
    }
    for name, source in files.items():
        (root / name).write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    return root


def code_digest(module: str) -> str:
    code = Code()
    code.add_module(module)
    return str(sorted((name, sorted(file.read_text() for file in files)) for name, files in code.files.items()))


@pytest.mark.parametrize("name", ["kernel.c", "kernel.h"])
def test_code_digest_changes_with_the_c_sources_beside_what_is_imported(package: Path, name: str) -> None:
    (package / "sub" / name).write_text("int one;")
    before = code_digest("closurepack.a")
    (package / "sub" / name).write_text("int two;")
    assert code_digest("closurepack.a") != before


def test_code_digest_tells_c_sources_apart_that_have_one_name_in_folders_of_one_name(package: Path) -> None:
    inner = package / "sub" / "sub"
    inner.mkdir()
    for file, source in (("__init__.py", ""), ("g.py", ""), ("kernel.c", "int one;")):
        (inner / file).write_text(source)
    (package / "sub" / "kernel.c").write_text("int one;")
    (package / "sub" / "f.py").write_text("from .sub import g\n")
    digests = {code_digest("closurepack.a")}
    for changed in (inner, package / "sub"):
        (changed / "kernel.c").write_text("int two;")
        digests.add(code_digest("closurepack.a"))
    assert len(digests) == 3


def test_closure_of_a_built_in_step_has_the_engine_and_not_the_runner() -> None:
    closure = import_closure("nemotron_steps.steps.grpo")
    assert "nemotron_steps.engine.losses.policy_gradient" in closure and "nemotron_steps.config.schema.rl" in closure
    assert not any(name.startswith(("nemotron_steps.runs", "nemotron_steps.cli")) for name in closure)


def test_plain_makes_strict_json_of_anything() -> None:
    import numpy

    value = {"a": numpy.float32(0.5), "b": numpy.arange(3), "c": math.inf, "d": Path("x"), 1: (True, None)}
    assert plain(value) == {"a": 0.5, "b": [0, 1, 2], "c": "inf", "d": "x", "1": [True, None]}


def test_plain_context_runs_a_step_without_a_store(tmp_path: Path) -> None:
    from tests.runs import runner_toy_steps

    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_text('{"value": 2}\n')
    config = runner_toy_steps.TrainConfig(data_path=str(tmp_path / "rows" / "train.jsonl"), steps=3)
    outputs = {"model": "toy_model", "report": "eval_report"}
    heard: list[str] = []
    context = plain_context(
        config,
        tmp_path / "out",
        inputs={"rows": tmp_path / "rows"},
        outputs=outputs,
        listener=lambda record: heard.append(record["kind"]),
        step_id="toy/train",
    )
    assert context.inputs["rows"].type == "training_jsonl" and context.inputs["rows"].attributes["rows"] == {"train": 1}
    runner_toy_steps.train(context)
    assert json.loads((context.outputs["report"].path / "report.json").read_text())["metrics"]["sum"] == 6
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == heard.count("metrics") == 3
    assert (context.step_id, context.tracker.step) == ("toy/train", "toy/train")
    given = plain_context(config, tmp_path / "more", inputs=context.inputs)
    assert given.inputs == context.inputs and given.outputs == {}


def test_failure_matches_by_code_class_cause_and_pattern() -> None:
    def names(error: BaseException, *entries: ErrorHint) -> list[str]:
        manifest = StepManifest(step=StepTable(id="s"), errors=entries)
        return [hint.name for hint in hints_for_failure(error, [], manifest, {})]

    entries = (
        ErrorHint(name="code", match="E601", recovery="r"),
        ErrorHint(name="class", match="LookupError", recovery="r"),
        ErrorHint(name="pattern", match=["nothing", "port [0-9]+ in use"], recovery="r"),
        ErrorHint(name="other", match="E600", recovery="r"),
        ErrorHint(name="none", recovery="r"),
    )
    error = StepFailedError("it broke")
    error.__cause__ = KeyError("x")
    assert names(error, *entries) == ["class"], "the wrapper around an unexpected exception matches nothing itself"
    assert names(StepFailedError("it broke"), *entries) == ["code"]
    assert names(OSError("port 8080 in use"), *entries) == ["pattern"]
    cycle = ValueError("a")
    cycle.__context__ = cycle
    assert names(cycle, *entries) == []


def test_lines_leave_out_what_is_noise() -> None:
    base = {"step": "s", "time": 0.0}
    assert render({**base, "kind": "progress", "description": "x", "completed": 1, "total": 2}) is None
    assert render({**base, "kind": "sample", "sample": {}}) is None
    long = render({**base, "kind": "metrics", "index": 4, "values": {f"m{i}": float(i) for i in range(9)}})
    assert long is not None and long.endswith("(+3 more)") and long.startswith("[s] step 4: m0=0")


def test_planning_and_running_import_nothing_heavy() -> None:
    code = (
        "import sys, nemotron_steps.runs.execute, nemotron_steps.runs.cache, nemotron_steps.runs.report;"
        "print([m for m in ('torch','ray','vllm','hydra','wandb','transformers','fsspec','yaml') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_the_log_goes_on_after_a_library_configured_logging(tmp_path: Path) -> None:
    code = (
        "import logging, logging.config, pathlib, sys\n"
        "from nemotron_steps.runs.log_format import RunLog\n"
        "log = RunLog(pathlib.Path(sys.argv[1]), str)\n"
        "logging.getLogger().addHandler(log)\n"
        "logging.config.dictConfig({'version': 1, 'disable_existing_loggers': False})\n"
        "logging.getLogger('library').warning('imported')\n"
        "log.write_text('the run goes on')\n"
        "log.end()\n"
    )
    # A process of its own: what is configured cannot be undone.
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "log.txt")], check=True, timeout=60)
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == ["library WARNING: imported", "the run goes on"]


def test_an_interrupt_within_a_task_leaves_no_traceback_of_asyncio() -> None:
    code = (
        "import asyncio, gc, os, signal\n"
        "from nemotron_steps.stopping import interruptible\n"
        "async def judge(): pass\n"
        "async def wait(work): await work\n"
        "async def work(): os.kill(os.getpid(), signal.SIGINT)\n"
        "async def main():\n"
        "    tasks = [asyncio.ensure_future(work()), asyncio.ensure_future(wait(judge()))]\n"
        "    await asyncio.gather(*tasks)\n"
        "try:\n"
        "    with interruptible():\n"
        "        asyncio.run(main())\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
        "gc.collect()\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (result.stdout, result.stderr) == ("interrupted\n", "")
