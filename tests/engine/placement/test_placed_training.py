"""SFT, the judge's training and DPO with policy ranks in actors: the figures of one process, in any layout."""

import json
import random
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.grpo_task import prompts
from nemotron_steps.artifacts.validators import validate
from nemotron_steps.config.schema.dpo import DpoConfig
from nemotron_steps.config.schema.sft import GenRmConfig, SftConfig
from nemotron_steps.engine.grpo.loop import train
from nemotron_steps.engine.losses.policy_gradient import PolicyGradientLoss
from nemotron_steps.engine.losses.supervised import NegativeLogLikelihood
from nemotron_steps.engine.setup.backends import build_policy
from nemotron_steps.runs.context import Tracker
from nemotron_steps.runs.hints import flat_numbers
from nemotron_steps.steps import supervised
from tests.engine.grpo.grpo_runs import metrics_of
from tests.engine.placement.conftest import config_of, start

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]
TWO_RANKS = {"backend": "ray", "policy_workers": 2}
TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Chats and preference pairs about the tiny policy's prompts, of unequal lengths."""
    folder, rng = tmp_path_factory.mktemp("chats"), random.Random(0)
    chats, pairs = [], []
    for question in prompts(24):
        good, bad = ("".join(rng.choice(letters) for _ in range(rng.randint(2, 30))) for letters in ("aeiou", "bcdfg"))
        asked = {"role": "user", "content": question}
        chats.append({"messages": [asked, {"role": "assistant", "content": good}]})
        pairs.append({"prompt": question, "chosen": good, "rejected": bad})
    for name, rows in (("chats", chats), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def policy_of(checkpoint, **changes):
    fsdp = changes.get("dtensor_cfg", {}).get("enabled")
    optimizer = {"optimizer": {"kwargs": {"lr": 2e-3}}} if fsdp else {}
    megatron = {} if fsdp else {"optimizer": {"lr": 2e-3}, **changes.get("megatron_cfg", {})}
    return {
        "checkpoint": str(checkpoint),
        "precision": "float32",
        "train_global_batch_size": 6,
        "train_micro_batch_size": 2,
        "logprob_batch_size": 4,
        "max_total_sequence_length": 96,
        **changes,
        **optimizer,
        "megatron_cfg": megatron,
    }


def sft(checkpoint, data, steps, schema=SftConfig, **changes):
    file = {"data_path": str(data / "chats.jsonl")}
    files = ["train", "validation", *(["heldout"] if schema is GenRmConfig else [])]
    return schema.model_validate(
        {
            "sft": {"max_num_steps": steps, "max_num_epochs": 5, "val_batches": 1},
            "data": dict.fromkeys(files, file),
            "checkpointing": {"save_period": 2, "save_async": True},
            **changes,
            "policy": policy_of(checkpoint, **changes.get("policy", {})),
        }
    )


def run(step, config, work, output="output"):
    """Metrics of each step, the summary, where the policy was, and the folder written."""
    records: list[dict] = []
    slot = SimpleNamespace(path=work / output, attributes={}, type="checkpoint_megatron")
    tracker = Tracker("test", None, records.append)
    outputs = {"model": slot, "reward_model": slot}
    step(SimpleNamespace(config=config, work=work, started=time.monotonic(), tracker=tracker, outputs=outputs))
    (placement,) = [r["fields"] for r in records if r["kind"] == "event" and r["name"] == "placement"]
    (summary,) = [r["values"] for r in records if r["kind"] == "summary"]
    trained = [record for record in records if record.get("index") != 0]  # 0: validation before the first step
    return SimpleNamespace(metrics=metrics_of(trained), summary=summary, placement=placement, output=slot.path)


def assert_same(there, here, names=("loss", "grad_norm", "lr")):
    assert there.placement["backend"] == "ray" and len(there.placement["workers"]) == 2
    assert here.placement == {"backend": "process"}
    for name in names:
        assert [m[name] for m in there.metrics] == pytest.approx([m[name] for m in here.metrics], rel=1e-4), name


def weights_of(folder, config):
    """Weights of a checkpoint, whatever its format, in this process."""
    policy = build_policy(config.policy, folder, NegativeLogLikelihood(), reference=False, total_steps=1)
    return dict(policy.weights())


def assert_same_weights(there, here, config):
    found, expected = weights_of(there.output, config), weights_of(here.output, config)
    assert found.keys() == expected.keys()
    # Steps are of size 2e-3; a gradient near zero may make Adam's first ones differ by a little of that.
    assert all((found[name] - expected[name]).abs().max() < 1e-4 for name in expected)


def test_sft_on_two_data_ranks_goes_on_as_two_tensor_ranks_and_equals_one_process(cluster, checkpoint, data, tmp_path):
    config = sft(checkpoint, data, 4)
    here = run(supervised.sft_megatron_bridge, config, tmp_path / "process")
    first = run(
        supervised.sft_megatron_bridge, sft(checkpoint, data, 2, cluster=TWO_RANKS), tmp_path / "ray", "of two steps"
    )
    tensor = sft(checkpoint, data, 4, cluster=TWO_RANKS, policy={"megatron_cfg": TENSOR})
    then = run(supervised.sft_megatron_bridge, tensor, tmp_path / "ray")
    assert (len(first.metrics), len(then.metrics)) == (2, 2)
    then.metrics = first.metrics + then.metrics
    assert_same(then, here)
    assert then.summary["validation_loss"] == pytest.approx(here.summary["validation_loss"], rel=1e-4)
    for written in (first, then):  # also by ranks that only hold replicas
        assert validate("checkpoint_megatron", written.output) == validate("checkpoint_megatron", here.output)
    assert_same_weights(then, here, config)


def test_dpo_on_two_ranks_keeps_pairs_together_and_equals_one_process(cluster, checkpoint, data, tmp_path):
    def config(**changes):
        file = {"data_path": str(data / "pairs.jsonl")}
        values = {
            "dpo": {"max_num_steps": 3, "reference_policy_kl_penalty": 0.5, "val_batches": 1, "sft_loss_weight": 0.1},
            "data": {"train": file, "validation": file},
            "checkpointing": {"enabled": False},
            **changes,
        }
        values["policy"] = policy_of(checkpoint, train_global_batch_size=6, **changes.get("policy", {}))
        return DpoConfig.model_validate(values)

    here = run(supervised.dpo, config(), tmp_path / "process")
    packed = {"sequence_packing": {"enabled": True, "train_mb_tokens": 170, "logprob_mb_tokens": 170}}
    there = run(supervised.dpo, config(cluster=TWO_RANKS, policy=packed), tmp_path / "ray")
    assert here.metrics[0]["preference_loss"] == pytest.approx(0.693147, abs=1e-6)
    assert_same(there, here, ("loss", "preference_loss", "grad_norm", "rewards_chosen", "rewards_rejected"))
    assert flat_numbers(there.summary) == pytest.approx(flat_numbers(here.summary), rel=1e-4)
    assert_same_weights(there, here, config())


def test_a_judge_trained_under_fsdp_on_two_ranks_is_the_one_of_one_process(cluster, checkpoint, data, tmp_path):
    def config(**changes):
        changes["policy"] = {"dtensor_cfg": {"enabled": True}}
        return sft(checkpoint, data, 2, GenRmConfig, agreement={"max_pairs": 1}, **changes)

    here = run(supervised.genrm, config(), tmp_path / "process")
    there = run(supervised.genrm, config(cluster=TWO_RANKS), tmp_path / "ray")
    assert_same(there, here)
    assert flat_numbers(there.summary) == pytest.approx(flat_numbers(here.summary), rel=1e-4)
    assert validate("checkpoint_hf", there.output) == validate("checkpoint_hf", here.output)
    assert_same_weights(there, here, config())


def test_ranks_write_their_parts_behind_the_training(cluster, checkpoint, tmp_path):
    config = config_of(
        checkpoint,
        3,
        cluster__backend="ray",
        cluster__policy_workers=2,
        policy__megatron_cfg__tensor_model_parallel_size=2,
        policy__megatron_cfg__optimizer={"lr": 2e-3, "use_distributed_optimizer": True},
        checkpointing={"save_async": True, "save_period": 1, "keep_top_k": None},
    )
    run, _ = start(config, tmp_path)
    try:
        train(run)
        expected = {name: tensor.clone() for name, tensor in run.policy.weights()}
    finally:
        run.close()
    saved = run.checkpoints.all()
    assert [c.step for c in saved] == [1, 2, 3]
    parts = [{p.name: p.read_bytes() for p in Path(c.policy_path, "weights").glob("*.distcp")} for c in saved]
    assert all(len(files) == 2 for files in parts)  # one a rank
    assert parts[0] != parts[1] != parts[2]
    alone = build_policy(
        config_of(checkpoint, 3).policy,
        checkpoint,
        PolicyGradientLoss(config.loss_fn),
        reference=False,
        total_steps=3,
    )
    alone.load_checkpoint(saved[-1].policy_path)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in alone.weights())
