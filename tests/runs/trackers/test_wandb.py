"""The W&B mirror in offline mode: what was written is read back from W&B's own transaction log."""

import json
import os
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.config.profiles import MirrorSettings, WandbSettings
from nemotron_steps.errors import InterruptedRunError, NonFiniteLossError
from nemotron_steps.runs.execute import execute
from tests.runs.runner_toy_plan import make_plan, run

wandb = pytest.importorskip("wandb")
from wandb import env  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def own_service() -> None:
    """W&B's service that an earlier test of this process has used may have ended since."""
    with suppress(Exception):
        wandb.teardown()
    os.environ.pop(env.SERVICE, None)


OFFLINE = MirrorSettings(wandb=WandbSettings(project="toy", mode="offline"))


def transactions(path: Path) -> Iterator[Any]:
    """Records of a .wandb file: a LevelDB log (7-byte header, blocks of 32 KiB, chunks of full or split records).

    Those that are whole: the file may still be written.
    """
    from wandb.proto import wandb_internal_pb2

    data, offset, parts = path.read_bytes(), 7, b""
    assert data.startswith(b":W&B") or len(data) < 4
    while offset + 7 <= len(data):
        left = 32768 - offset % 32768
        if left < 7:
            offset += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, offset)
        if offset + 7 + length > len(data):
            return
        parts += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def logs(folder: Path) -> dict[str, list[Any]]:
    """Job type (step id) → the records of its W&B run."""
    found: dict[str, list[Any]] = {}
    for path in sorted((folder / "wandb").glob("offline-run-*/run-*.wandb")):
        # W&B's own process writes the log, and goes on for a moment when a run has been finished.
        deadline = time.monotonic() + 30
        records = list(transactions(path))
        while not any(r.WhichOneof("record_type") == "exit" for r in records):
            assert time.monotonic() < deadline, f"{path} has no end"
            time.sleep(0.1)
            records = list(transactions(path))
        job = next(r.run.job_type for r in records if r.WhichOneof("record_type") == "run")
        found[job] = records
    return found


def artifacts_of(records: list[Any]) -> dict[tuple[str, str], Any]:
    """(name, type) → what was used or logged."""
    return {
        (a.name, a.type): a
        for record in records
        if record.WhichOneof("record_type") in ("artifact", "request")
        and (a := record.artifact if record.HasField("artifact") else record.request.log_artifact.artifact).name
    }


def test_offline_mirror_has_metrics_artifacts_and_edges(store: ArtifactStore) -> None:
    result = run(store, mirrored=OFFLINE, make={"api_key": "sk-not-for-wandb"}, train={"fail": "signal"})
    by_step = logs(result.folder)
    assert sorted(by_step) == ["toy/make", "toy/train"]
    train = by_step["toy/train"]
    history = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in train
        if record.WhichOneof("record_type") == "history"
    ]
    history = [row for row in history if "sum" in row]
    assert [row["training_step"] for row in history] == list(range(1, 11))
    assert history[-1]["sum"] == 285
    told = {record.WhichOneof("record_type"): record for record in train}
    assert told["run"].run.display_name == f"toy/train {result.id}" and told["run"].run.run_group == result.id
    assert (told["alert"].alert.title, told["alert"].alert.text) == ("kl_spike", "kl=0.9123456, step=6")
    summary = {item.key: item.value_json for each in train for item in each.summary.update}
    assert (summary["sum/before"], summary["sum/after"], summary["steps"]) == ("0", "285", "10")
    artifacts = artifacts_of(train)
    assert sorted(key for key in artifacts if key[1] != "run_table") == [
        ("toy-make-rows", "training_jsonl"),
        ("toy-train-model", "toy_model"),
        ("toy-train-report", "eval_report"),
    ]
    used = artifacts[("toy-make-rows", "training_jsonl")]
    model = artifacts[("toy-train-model", "toy_model")]
    assert used.use_after_commit and not model.use_after_commit
    assert sorted(model.aliases) == ["latest", "toy-train-model-v1"]
    metadata = json.loads(model.metadata)
    assert metadata["digest"] == store.find("toy/train/model").digest
    assert metadata["inputs"] == {"rows": "toy/make/rows:v1"}
    for path in (result.folder / "wandb").rglob("*"):
        assert not path.is_file() or b"sk-not-for-wandb" not in path.read_bytes(), path


def test_a_model_has_the_name_of_the_public_recipes(store: ArtifactStore) -> None:
    plan = make_plan()
    step = "rl/train"
    made, train = plan.steps[0], replace(plan.steps[1], step_id=step)
    by_step = logs(execute(replace(plan, steps=(made, train)), store, mirrored=OFFLINE).folder)
    model = artifacts_of(by_step[step])[("ModelArtifact-rl", "model")]
    assert sorted(model.aliases) == ["latest", "rl-train-model-v1"]


@pytest.mark.parametrize(("raised", "fail", "code"), [(NonFiniteLossError, "nan", 1), (InterruptedRunError, "", 130)])
def test_a_step_that_does_not_finish_ends_its_wandb_run(
    store: ArtifactStore, raised: type[Exception], fail: str, code: int
) -> None:
    def interrupt(record: dict[str, Any]) -> None:
        if record["kind"] == "sample":
            raise KeyboardInterrupt

    with pytest.raises(raised):
        execute(make_plan(train={"fail": fail}), store, listeners=[interrupt], mirrored=OFFLINE)
    (folder,) = (store.backend.scratch / "runs").iterdir()
    exits = [r.exit.exit_code for r in logs(folder)["toy/train"] if r.WhichOneof("record_type") == "exit"]
    assert exits == [code]


def test_a_wandb_that_wants_a_key_is_told_with_what_does_without(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    wandb.teardown()
    result = run(store, mirrored=MirrorSettings(wandb=WandbSettings(project="toy", mode="online")))
    log = (result.folder / "log.txt").read_text()
    assert "the W&B mirror stops here" in log and "export WANDB_MODE=offline" in log
