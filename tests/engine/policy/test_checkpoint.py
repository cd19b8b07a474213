"""Checkpoints: random states of every rank, and snapshots that are written behind the training, of their own step."""

import base64
import copy
import json
import resource
import subprocess
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nemotron_steps.config.schema.rl import CheckpointingConfig
from nemotron_steps.engine.checkpoints import CheckpointManager
from nemotron_steps.engine.policy import checkpoint
from nemotron_steps.engine.policy.checkpoint import random_states, restore_random_states, saved_random_states
from nemotron_steps.engine.policy.dtensor import DTensorPolicy
from nemotron_steps.engine.policy.megatron import MegatronPolicy
from nemotron_steps.errors import ArtifactError, StorageError
from nemotron_steps.models.megatron_core import ensure_process_group
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


@pytest.fixture
def second(monkeypatch):
    """A generator in the place of CUDA's."""
    ensure_process_group()
    generator = torch.Generator().manual_seed(7)
    of_torch = checkpoint._generators()[:1]
    monkeypatch.setattr(checkpoint, "_generators", lambda: [*of_torch, (generator.get_state, generator.set_state)])
    return generator


def drawn(generator):
    return torch.rand(3).tolist(), torch.rand(3, generator=generator).tolist()


def test_both_generators_go_on_where_they_were(second):
    saved = json.loads(json.dumps(random_states((1, 1, 1))))
    expected = drawn(second)
    assert drawn(second) != expected
    restore_random_states(saved, (1, 1, 1))
    assert drawn(second) == expected


def test_a_generator_that_was_not_saved_stays_as_it_is(second, monkeypatch):
    both = checkpoint._generators()
    monkeypatch.setattr(checkpoint, "_generators", lambda: both[:1])
    saved = random_states(())
    before = second.get_state()
    monkeypatch.setattr(checkpoint, "_generators", lambda: both)
    restore_random_states(saved, ())
    assert torch.equal(second.get_state(), before)


def test_each_rank_has_its_own_in_the_same_layout_and_rank_0s_in_another(second, monkeypatch):
    states = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        states.append(random_states((1,)))
    saved = copy.deepcopy(states[0])
    saved["layout"], saved["of_rank"] = [3, 1], [0, 1, 0]
    saved["states"] = [states[0]["states"][0], states[1]["states"][0]]
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    for layout, seeds in (((1,), (1, 2, 1)), ((2,), (1, 1, 1))):
        for rank, seed in enumerate(seeds):
            monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
            restore_random_states(saved, layout)
            found = torch.rand(2)
            assert torch.equal(found, torch.rand(2, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("written", [lambda s: base64.b64encode(s.numpy().tobytes()).decode(), lambda s: s.tolist()])
def test_the_state_of_an_earlier_versions_checkpoint_is_read(written, second):
    position = json.loads(json.dumps({"optimizer_steps": 1, "torch_rng": written(torch.get_rng_state())}))
    expected = torch.rand(3)
    restore_random_states(saved_random_states(position), (1, 1, 1))
    assert torch.equal(torch.rand(3), expected)
    with pytest.raises(KeyError):
        saved_random_states({"optimizer_steps": 1})
