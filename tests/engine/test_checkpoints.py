"""When checkpoints are committed, what survives a kill, and where a writer's errors come out."""

import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemotron_steps.config.schema.rl import CheckpointingConfig
from nemotron_steps.engine import checkpoints
from nemotron_steps.engine.checkpoints import CheckpointManager, Deadline
from nemotron_steps.errors import ConfigError, StorageError


class Weights:
    """A policy of one number; its writes wait for `go`."""

    def __init__(self) -> None:
        self.value = 0
        self.go = threading.Event()
        self.go.set()
        self.failure: OSError | None = None
        self.seconds = 0.0

    def save_checkpoint(self, path: str) -> None:
        self.snapshot().write(path)

    def snapshot(self) -> Any:
        value, policy = self.value, self

        class Copy:
            def write(self, path: str) -> None:
                assert policy.go.wait(30)
                if policy.failure is not None:
                    raise policy.failure
                time.sleep(policy.seconds)
                Path(path, "value").write_text(str(value))

        return Copy()


def manager_of(folder: Path, **changes: Any) -> CheckpointManager:
    return CheckpointManager(folder, CheckpointingConfig.model_validate({"save_async": True, **changes}))


def values(folder: Path) -> list[tuple[int, str]]:
    return [(c.step, Path(c.policy_path, "value").read_text()) for c in manager_of(folder).all()]


def test_a_save_returns_before_it_is_committed_and_belongs_to_its_own_step(tmp_path: Path) -> None:
    policy, tensor = Weights(), torch.zeros(3)
    policy.go.clear()
    state = {"step": 1}
    with manager_of(tmp_path) as manager:
        manager.save(1, policy, state, {"buffer": tensor})  # type: ignore[arg-type]
        assert manager.latest() is None
        policy.value, state["step"] = 7, 7
        tensor.fill_(7)
        policy.go.set()
    (committed,) = manager.all()
    assert committed.state() == {"step": 1} and values(tmp_path) == [(1, "0")]
    assert committed.tensors()["buffer"].tolist() == [0.0] * 3


def test_an_error_of_the_writer_comes_out_at_the_next_step_and_leaves_older_checkpoints_alone(tmp_path: Path) -> None:
    policy = Weights()
    with manager_of(tmp_path) as manager:
        manager.save(1, policy, {})  # type: ignore[arg-type]
        manager.wait()
        policy.failure = OSError(28, "No space left on device")
        manager.save(2, policy, {})  # type: ignore[arg-type]
        with pytest.raises(StorageError, match=r"step 2.*No space left"):
            for _ in range(500):
                manager.check()
                time.sleep(0.01)
        manager.check()  # raised once
    assert values(tmp_path) == [(1, "0")] and not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("save_async", [False, True])
@pytest.mark.parametrize(
    ("rewards", "settings", "kept"),
    [
        ([0.9, 0.8, 0.7, 0.1], {"keep_top_k": 1}, [1, 4]),
        ([0.9, 0.1, 0.8, 0.7], {"keep_top_k": 1, "higher_is_better": False}, [2, 4]),
        ([0.9, 0.5, 0.5, 0.1], {"keep_top_k": 2}, [1, 3, 4]),  # the newer of equals
        ([-9.0, math.nan, -8.0, math.nan], {"keep_top_k": 2, "higher_is_better": False}, [1, 3, 4]),
    ],
)
def test_the_best_are_kept_and_the_newest_besides(
    rewards: list[float | None], settings: dict[str, Any], kept: list[int], save_async: bool, tmp_path: Path
) -> None:
    policy = Weights()
    with manager_of(tmp_path, save_async=save_async, **{"metric_name": "reward", **settings}) as manager:
        for step, reward in enumerate(rewards, start=1):
            metrics = {"loss": 1.0} if reward is None else {"reward": reward}
            manager.save(step, policy, {"metrics": metrics}, reported=["reward"])  # type: ignore[arg-type]
    assert [step for step, _ in values(tmp_path)] == kept


def test_a_metric_that_no_step_reports_is_refused_at_the_first_save(tmp_path: Path) -> None:
    policy, metrics = Weights(), {"reward/mean": 0.1, "loss": 1.0}
    misspelt = manager_of(tmp_path, metric_name="rewrad/mean")
    with pytest.raises(ConfigError, match="no step has reported the metric rewrad/mean") as caught, misspelt as manager:
        manager.save(1, policy, {"metrics": metrics}, reported=["validation/reward"])  # type: ignore[arg-type]
    assert caught.value.expected == "loss, reward/mean, validation/reward" and not manager.all()
    assert caught.value.hints[0] == "checkpointing.metric_name=reward/mean"
    with manager_of(tmp_path, metric_name="validation/reward") as manager:
        manager.save(1, policy, {"metrics": metrics}, reported=["validation/reward"])  # type: ignore[arg-type]
        manager.save(2, policy, {"metrics": {**metrics, "validation/reward": 0.5}})  # type: ignore[arg-type]
    assert manager._writer is None
    with manager_of(tmp_path, metric_name="validation/reward") as again:  # an earlier attempt has reported it
        again.save(3, policy, {"metrics": metrics})  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------- killed while writing


def _digest(policy: Any) -> str:
    digest = hashlib.sha256()
    for name, tensor in policy.weights():
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _save_for_ever(source: str, folder: str) -> None:
    """Train and save every step, with enough beside the weights that a save is nearly always being written."""
    from nemotron_steps.engine.policy.megatron import MegatronPolicy
    from tests.engine.policy.batches import grouped_batch, policy_config, rl_loss

    torch.set_num_threads(1)
    policy: Any = MegatronPolicy(policy_config(), source, rl_loss())
    buffer = {"buffer": torch.zeros(16 << 20)}
    with manager_of(Path(folder), keep_top_k=None) as manager:
        for step in range(1, 200):
            policy.train_step(grouped_batch(step))
            manager.save(step, policy, {"digest": _digest(policy)}, buffer)


def test_a_kill_while_writing_leaves_the_older_checkpoint_whole(tmp_path: Path) -> None:
    from nemotron_steps.engine.policy.megatron import MegatronPolicy
    from tests.engine.policy.batches import policy_config, rl_loss
    from tests.models.checkpoints import write_checkpoint

    source, folder = tmp_path / "qwen3", tmp_path / "checkpoints"
    write_checkpoint("qwen3", source, initializer_range=0.1)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.engine.test_checkpoints", str(source), str(folder)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        deadline = time.monotonic() + 120
        while not (folder / "step_00000003.partial" / "state.safetensors").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.001)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert list(folder.glob("*.partial")), "the kill came too late to test anything"
    latest = CheckpointManager(folder, CheckpointingConfig()).latest()
    assert latest is not None and latest.step >= 2 and not list(folder.glob("*.partial"))
    policy: Any = MegatronPolicy(policy_config(), source, rl_loss())
    policy.load_checkpoint(latest.policy_path)
    assert _digest(policy) == json.loads((latest.path / "state.json").read_text())["digest"]
    assert latest.tensors()["buffer"].numel() == 16 << 20


if __name__ == "__main__":
    _save_for_ever(sys.argv[1], sys.argv[2])


def test_links_in_a_shared_home_are_neither_read_nor_removed_through(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "state.json").write_text('{"metrics": {}}')
    folder, policy = tmp_path / "checkpoints", Weights()
    with manager_of(folder) as manager:
        policy.value = 1
        manager.save(1, policy, {"metrics": {}})
    (folder / "step_00000009").symlink_to(elsewhere)
    (folder / "step_00000002.partial").symlink_to(elsewhere)
    (folder / "step_notes").mkdir()
    again = manager_of(folder)
    assert [checkpoint.step for checkpoint in again.all()] == [1]
    with again:
        policy.value = 9
        again.save(9, policy, {"metrics": {}})
    assert (elsewhere / "state.json").is_file()
    assert values(folder) == [(1, "1"), (9, "9")]

    (folder / "step_00000009" / "policy" / "more").symlink_to(elsewhere)
    with pytest.raises(StorageError, match="holds a link") as caught:
        manager_of(folder).latest()
    assert caught.value.where.endswith("policy/more")
    subprocess.run(caught.value.hints[0], shell=True, check=True)
    latest = manager_of(folder).latest()
    assert latest is not None and latest.step == 1


def test_only_whole_checkpoints_are_found_and_what_a_kill_left_is_removed(tmp_path: Path) -> None:
    policy = Weights()
    with manager_of(tmp_path, save_async=False) as manager:
        assert manager.latest() is None
        for step in (9, 100, 20):
            policy.value = step
            manager.save(step, policy, {"at": step})  # type: ignore[arg-type]
        policy.value = 7
        manager.save(20, policy, {"at": 7})  # type: ignore[arg-type]  # a resumed run comes there again
    for name in ("step_00000101.partial", "step_00000102", "step_7", "other"):
        (tmp_path / name).mkdir()
    again = manager_of(tmp_path)
    assert not (tmp_path / "step_00000101.partial").exists() and (tmp_path / "other").exists()
    assert values(tmp_path) == [(9, "9"), (20, "7"), (100, "100")]
    latest = again.latest()
    assert latest is not None and latest.step == 100 and latest.state() == {"at": 100} and latest.tensors() == {}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


SECONDS = st.integers(1, 600).map(float)


@given(loading=SECONDS, step=SECONDS, save=SECONDS, later=st.integers(0, 36_000))
def test_the_last_save_is_committed_in_time_and_another_step_would_not_have_been(
    loading: float, step: float, save: float, later: int
) -> None:
    clock = Clock()
    limit = loading + save + step + save + later
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "time", SimpleNamespace(monotonic=clock.monotonic))
        watched = Deadline(limit, started=0.0)
        clock.now = loading + save
        watched.saved(save)  # an earlier one, so that it is known how long one takes
        watched.step_begins()
        while True:
            clock.now += step
            watched.step_ended()
            if watched.reached:
                break
        committed = clock.now + save
    assert committed <= limit <= committed + step
