"""Checkpoints are repeatable, and a snapshot written behind the training is the checkpoint of its own step."""

from __future__ import annotations

import base64
import json
import resource
import subprocess
import threading
from pathlib import Path

import pytest
import torch

from nemotron_steps.config.schema.rl import CheckpointingConfig
from nemotron_steps.engine.checkpoints import CheckpointManager
from nemotron_steps.engine.policy.dtensor import DTensorPolicy
from nemotron_steps.engine.policy.megatron import MegatronPolicy
from nemotron_steps.errors import ArtifactError, StorageError
from tests.engine.policy.batches import grouped_batch, policy_config, rl_loss

KINDS = [(MegatronPolicy, "float32"), (MegatronPolicy, "bfloat16"), (DTensorPolicy, "float32")]


def content(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def trained(kind, precision, folder, steps=2):
    policy = kind(policy_config(precision=precision), folder, rl_loss())
    for seed in range(steps):
        policy.train_step(grouped_batch(seed))
    return policy


@pytest.mark.parametrize(("kind", "precision"), KINDS)
def test_two_saves_of_a_policy_are_equal_byte_for_byte(kind, precision, qwen3_folder, tmp_path):
    policy = trained(kind, precision, qwen3_folder)
    policy.save_checkpoint(str(tmp_path / "one"))
    policy.save_checkpoint(str(tmp_path / "two"))
    assert content(tmp_path / "one") == content(tmp_path / "two")
    policy.train_step(grouped_batch(2))
    policy.save_checkpoint(str(tmp_path / "three"))
    assert content(tmp_path / "three") != content(tmp_path / "one")


@pytest.mark.parametrize(("kind", "precision"), KINDS)
def test_a_snapshot_is_of_its_own_step_and_training_does_not_notice(kind, precision, qwen3_folder, tmp_path):
    plain, watched = trained(kind, precision, qwen3_folder), trained(kind, precision, qwen3_folder)
    plain.save_checkpoint(str(tmp_path / "expected"))
    snapshot = watched.snapshot()
    writer = threading.Thread(target=snapshot.write, args=[str(tmp_path / "found")])
    expected = [plain.train_step(grouped_batch(2)), plain.train_step(grouped_batch(3))]
    found = [watched.train_step(grouped_batch(2))]
    writer.start()  # the weights have moved on before a byte is written, and move again meanwhile
    found.append(watched.train_step(grouped_batch(3)))
    writer.join()
    assert found == expected
    assert content(tmp_path / "found") == content(tmp_path / "expected")
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(plain.weights(), watched.weights(), strict=True))
    resumed = kind(policy_config(precision=precision), qwen3_folder, rl_loss())
    resumed.load_checkpoint(str(tmp_path / "found"))
    assert resumed.train_step(grouped_batch(2)) == expected[0]


@pytest.mark.parametrize("kind", [MegatronPolicy, DTensorPolicy])
def test_a_disk_that_refuses_is_a_storage_error(kind, qwen3_folder, tmp_path):
    policy = trained(kind, "float32", qwen3_folder, steps=0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))  # the weights are larger than that
    try:
        with pytest.raises(StorageError, match="could not be written"):
            policy.snapshot().write(str(tmp_path / "small"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(("kind", "precision"), KINDS[1:])
def test_the_hint_about_a_broken_checkpoint_leads_to_the_one_before(kind, precision, qwen3_folder, tmp_path):
    policy = trained(kind, precision, qwen3_folder, steps=1)
    checkpoints = CheckpointManager(tmp_path / "checkpoints", CheckpointingConfig())
    for step in (1, 2):
        checkpoints.save(step, policy, {})
    newest = checkpoints.latest()
    (Path(newest.policy_path) / "policy.json").write_text("{")
    with pytest.raises(ArtifactError, match="not a training checkpoint") as caught:
        policy.load_checkpoint(newest.policy_path)
    subprocess.run(caught.value.hints[0], shell=True, check=True)
    assert checkpoints.latest().step == 1
    policy.load_checkpoint(checkpoints.latest().policy_path)


@pytest.mark.parametrize("kind", [MegatronPolicy, DTensorPolicy])
def test_a_damaged_random_state_is_told_as_a_broken_checkpoint(kind, qwen3_folder, tmp_path):
    policy = trained(kind, "float32", qwen3_folder, steps=0)
    policy.save_checkpoint(str(tmp_path / "found"))
    path = tmp_path / "found" / "policy.json"
    position = json.loads(path.read_text())
    saved = position["random_states"]
    half = base64.b64decode(saved["states"][0])[: saved["bytes"][0] // 2]
    saved["states"], saved["bytes"] = [base64.b64encode(half).decode()], [len(half)]
    path.write_text(json.dumps(position))
    with pytest.raises(ArtifactError, match="not a training checkpoint"):
        policy.load_checkpoint(str(tmp_path / "found"))
