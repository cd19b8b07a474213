"""On-policy distillation through the GRPO loops: who teaches which row, what is learnt, what a kill costs."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.grpo_task import make_checkpoint
from nemotron_steps.config.schema.opd import OpdConfig
from nemotron_steps.engine.grpo.step import TEACHER_KEY, Distillation
from nemotron_steps.engine.rollouts.data import read_rows
from tests.engine.engine_samples import random_batch, rollout
from tests.engine.grpo.grpo_runs import config_of, marked, metrics_of, run_loop, start

LOOPS = {"sync": False, "async": True}


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    folders = {}
    for seed, name in enumerate(("a", "b"), start=1):
        folders[name] = tmp_path_factory.mktemp("teacher") / name
        make_checkpoint(folders[name], seed)
    return {name: str(folder) for name, folder in folders.items()}


def distilling(task, steps, teachers, asynchronous=False, **changes):
    settings = {
        "loss_fn": {"kl_type": "reverse"},
        "on_policy_distillation__teachers": teachers,
        "on_policy_distillation__topk_logits_k": 32,
        "grpo__async_grpo__enabled": asynchronous,
    }
    return config_of(task, steps, schema=OpdConfig, **{**settings, **changes})


def two_kinds(task):
    """Prompts of which every other one names the second teacher."""
    rows = read_rows(task / "train.jsonl")[:32]
    return marked(rows, teacher=["ab"[i % 2] for i in range(len(rows))])


def asked_of(run):
    """The names that the run's teachers are asked with, a list a step."""
    asked, teachers = [], run.distillation.teachers

    class Asked:
        def score(self, batch, names):
            asked.append(names)
            return teachers.score(batch, names)

    run.distillation = replace(run.distillation, teachers=Asked())
    return asked


@pytest.mark.parametrize("asynchronous", LOOPS.values(), ids=LOOPS)
def test_the_policy_comes_closer_to_its_teachers(asynchronous, task, teachers, tmp_path):
    records = []
    config = distilling(task, 10, teachers, asynchronous, on_policy_distillation__teacher_field="teacher")
    run = start(config, tmp_path, records, two_kinds(task))
    scored = []
    score = run.distillation.teachers.score
    object.__setattr__(
        run.distillation.teachers, "score", lambda batch, names: scored.append(names) or score(batch, names)
    )
    run_loop(run)
    metrics = metrics_of(records)
    assert metrics[-1]["teacher_divergence"] < 0.8 * metrics[0]["teacher_divergence"]
    assert metrics[-1]["teacher_kl/mean"] < metrics[0]["teacher_kl/mean"]
    assert {name for names in scored for name in names} == {"a", "b"}
    assert all("reward/mean" in m and "teacher_kl/vowels" in m for m in metrics)
    assert not any(name.startswith(("advantages/", "groups/")) for m in metrics for name in m)


def test_teachers_may_give_advantages_of_the_sampled_tokens(task, teachers, tmp_path):
    records, batches = [], []
    config = distilling(
        task,
        10,
        teachers,
        on_policy_distillation__teacher_field="teacher",
        on_policy_distillation__topk_logits_k=64,
        grpo__adv_estimator={"name": "opd"},
        loss_fn={
            "disable_ppo_ratio": True,
            "use_importance_sampling_correction": True,
            "truncated_importance_sampling_type": "icepop",
            "truncated_importance_sampling_ratio": 5,
            "truncated_importance_sampling_ratio_min": 0.2,
        },
    )
    run = start(config, tmp_path, records, two_kinds(task))
    train = run.policy.train_step
    run.policy.train_step = lambda batch: batches.append(batch) or train(batch)
    run_loop(run)
    for batch in batches:
        trained = (batch.token_mask > 0) & (batch.sample_mask > 0)[:, None]
        assert trained.any() and not batch.advantages[~trained].any()
        gap = (batch.teacher_logprobs - batch.prev_logprobs)[trained]
        assert torch.allclose(batch.advantages[trained], gap, atol=1e-6) and gap.abs().max() > 0.1
    metrics = metrics_of(records)
    # One sample a token says less than a distribution: the mean of the last steps is that of a policy that learns.
    first, last = (sum(m["teacher_kl/mean"] for m in part) / 3 for part in (metrics[:3], metrics[-3:]))
    assert last < first and all(m["teacher_divergence"] == m["teacher_kl/mean"] for m in metrics)
    assert all("advantages/mean" in m and not any(name.startswith("groups/") for name in m) for m in metrics)


def test_rollouts_are_scored_by_the_teacher_of_their_row(task, teachers, tmp_path):
    rows, groups = two_kinds(task), []
    run = start(distilling(task, 1, teachers, on_policy_distillation__teacher_field="teacher"), tmp_path, rows=rows)
    asked, collect = asked_of(run), run.collector.collect

    async def collected(*args, **kwargs):
        groups.extend(await collect(*args, **kwargs))
        return groups

    run.collector.collect = collected
    run_loop(run)
    wanted = {row.index: row.row["teacher"] for row in rows}
    assert asked == [[wanted[group.prompt_index] for group in groups for _ in group.rollouts]]


def test_the_kl_to_the_teachers_is_a_mean_over_trained_tokens_of_each_environment() -> None:
    batch, _ = random_batch(rows=4, width=6, seed=2, noise_in_padding=False)
    batch.sample_mask[:] = torch.tensor([1.0, 1.0, 0.0, 1.0])
    batch.generation_logprobs = torch.arange(24.0).view(4, 6)
    rollouts = [
        rollout(index=n, environment=name, metadata={TEACHER_KEY: teacher})
        for n, (name, teacher) in enumerate((("maths", "a"), ("code", "b"), ("code", None), ("maths", "a")))
    ]
    asked = []

    class Teachers:
        def score(self, given: Any, names: Any) -> Any:
            asked.append(names)
            given.teacher_logprobs = torch.zeros(4, 6)
            return given

    prepared: Any = SimpleNamespace(batch=batch, rollouts=rollouts, metrics={"kept": 1.0})
    distillation = Distillation(teacher_of=None, teachers=Teachers())  # type: ignore[arg-type]
    distillation.score(prepared)
    assert asked == [["a", "b", None, "a"]]
    mask = batch.token_mask * batch.sample_mask[:, None]
    mask[:, 0] = 0
    nats, tokens = (batch.generation_logprobs * mask).sum(1), mask.sum(1)
    assert prepared.metrics == {
        "kept": 1.0,
        "teacher_kl/code": pytest.approx(float(nats[1] / tokens[1])),
        "teacher_kl/maths": pytest.approx(float((nats[0] + nats[3]) / (tokens[0] + tokens[3]))),
        "teacher_kl/mean": pytest.approx(float(nats.sum() / tokens.sum())),
    }
    assert distillation.own_metrics({"advantages/mean": 1.0, "groups/count": 1.0, "loss": 2.0}) == {"loss": 2.0}
