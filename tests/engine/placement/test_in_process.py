"""What a run's parts are given where all of them are in one process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from nemotron_steps.config.schema.policy import GenerationConfig
from nemotron_steps.config.schema.rl import ClusterConfig, EnvConfig
from nemotron_steps.engine.placement import parts as in_process
from nemotron_steps.engine.placement.parts import Wanted, WantedTeachers
from nemotron_steps.engine.placement.standalone import SamplingWanted, place_sampling
from nemotron_steps.engine.rollouts.judges import GeneratorJudge
from nemotron_steps.engine.setup.backends import build_judges
from nemotron_steps.environments.judged.judges import HttpJudge
from tests.engine.grpo.grpo_runs import config_of, start


class Http(HttpJudge):
    """A judge behind HTTP that is nowhere."""

    def __init__(self, closed):
        self.closed = closed

    def close(self):
        self.closed.append("judge")


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_judge_waits_for_the_policys_sampling_only_where_that_ever_ends(
    asynchronous, checkpoint, tmp_path, monkeypatch
):
    judge = {"responses_api_models": {"vllm_model": {"model": str(checkpoint), "max_total_sequence_length": 96}}}
    config = config_of(
        checkpoint,
        2,
        environment="judged",
        env__nemo_gym={"judge_model": judge},
        grpo__async_grpo__enabled=asynchronous,
    )
    given = []

    def noted(*arguments, **options):
        given.append(options["defer_to"])
        return build_judges(*arguments, **options)

    monkeypatch.setattr(in_process, "build_judges", noted)
    run = start(config, tmp_path)
    run.close()
    assert given == [None if asynchronous else run.sampler] and len(run.judges) == 1


def test_every_part_is_built_as_the_run_wants_it_and_has_its_place(checkpoint, tmp_path, monkeypatch):
    told = {}

    def noted(name, result):
        def build(*arguments, **options):
            told[name] = (arguments, options)
            return result

        monkeypatch.setattr(in_process, name, build)
        return result

    policy = noted("build_policy", SimpleNamespace(weights=lambda: "weights"))
    teachers = noted("build_teachers", object())
    closed = []
    generator = noted("build_generator", SimpleNamespace(close=lambda: closed.append("generator")))
    judges = noted("build_judges", {"judge_model": Http(closed), "genrm_model": object.__new__(GeneratorJudge)})
    config = config_of(checkpoint, 2, grpo__async_grpo__enabled=True)
    wanted = Wanted(
        checkpoint=tmp_path / "policy",
        hf_folder=tmp_path / "hf",
        chat=object(),
        loss_fn=object(),
        reference=True,
        total_steps=7,
        max_total_length=99,
        judges=frozenset(),
        teachers=WantedTeachers({"a": tmp_path}, 3, offload=True),
    )
    parts = in_process.place_in_process(config, wanted)
    assert told["build_policy"] == (
        (config.policy, wanted.checkpoint, wanted.loss_fn),
        {"reference": True, "total_steps": 7},
    )
    assert told["build_generator"] == (
        (wanted.hf_folder, config.policy.generation, wanted.chat),
        {
            "max_total_length": 99,
            "precision": config.policy.precision,
            "weights": "weights",
            "asynchronous": config.grpo.async_grpo,
            "record_routed_experts": config.policy.router_replay.enabled,
        },
    )
    assert told["build_judges"][1]["seed"] == config.grpo.seed
    assert told["build_teachers"] == ((policy, wanted.teachers.checkpoints), {"topk": 3, "offload": True})
    assert (parts.policy, parts.generator, parts.teachers) == (policy, generator, teachers)
    assert parts.sampler.generator is generator and parts.where == {"backend": "process"}
    assert parts.judges == list(judges.values()) and closed == []
    parts.resources.close()
    assert closed == ["judge", "generator"]


def test_what_samples_without_a_policy_is_built_as_it_is_wanted_and_closed(tmp_path, monkeypatch):
    told, closed = {}, []
    generator = SimpleNamespace(close=lambda: closed.append("generator"))
    http = Http(closed)

    def generators(*arguments, **options):
        told["generator"] = (arguments, options)
        return generator

    def judges(*arguments, **options):
        told["judges"] = (arguments, options)
        return {"judge_model": http}

    monkeypatch.setattr("nemotron_steps.engine.setup.backends.build_generator", generators)
    monkeypatch.setattr("nemotron_steps.engine.setup.backends.build_judges", judges)
    chat, env, generation = object(), EnvConfig(), GenerationConfig()
    roles = frozenset({"judge_model"})
    wanted = SamplingWanted(tmp_path, chat, generation, env, roles, "mcqa", 99, "float32", seed=5)
    parts = place_sampling(ClusterConfig(), wanted)
    assert told["generator"] == ((tmp_path, generation, chat), {"max_total_length": 99, "precision": "float32"})
    assert told["judges"] == ((env.nemo_gym, roles), {"defer_to": parts.sampler, "seed": 5})
    assert parts.sampler.generator is generator and parts.where == {"backend": "process"}
    assert parts.environments.route({}, "f:1").name == "mcqa" and closed == []
    parts.resources.close()
    assert closed == ["judge", "generator"]
