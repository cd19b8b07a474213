"""Which backend a config chooses, and what that one is told."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemotron_steps.config.schema.grpo import AsyncGrpoConfig
from nemotron_steps.config.schema.policy import GenerationConfig, PolicyConfig
from nemotron_steps.config.schema.rl import NemoGymConfig, VllmModelConfig
from nemotron_steps.engine.setup import backends as generator
from nemotron_steps.engine.setup import backends as policy
from nemotron_steps.engine.setup import judges
from nemotron_steps.errors import ArtifactError, UnsupportedError

CHAT: Any = SimpleNamespace(end_ids=(5,), decode=str)


class Told:
    """Stands for a backend: notes how it is made."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.arguments, self.options = arguments, options


@pytest.mark.parametrize(("enabled", "name"), [(True, "dtensor.DTensorPolicy"), (False, "megatron.MegatronPolicy")])
def test_a_policy_is_the_one_that_the_config_names(enabled: bool, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"nemotron_steps.engine.policy.{name}", Told)
    config = PolicyConfig.model_validate({"dtensor_cfg": {"enabled": enabled}})
    loss: Any = object()
    made: Any = policy.build_policy(config, Path("p"), loss, reference=True, total_steps=7)
    assert made.arguments == (config, Path("p"), loss) and made.options == {"reference": True, "total_steps": 7}


def test_teachers_are_for_the_megatron_policy_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemotron_steps.engine.policy.teachers.FrozenTeachers", Told)
    with pytest.raises(UnsupportedError, match="megatron"):
        policy.build_teachers(object(), {}, topk=None, offload=False)  # type: ignore[arg-type]
    monkeypatch.setattr("nemotron_steps.engine.policy.megatron.MegatronPolicy", Told)
    student: Any = Told()
    made: Any = policy.build_teachers(student, {"a": Path("t")}, topk=3, offload=True)
    assert made.arguments == (student, {"a": Path("t")}, 3) and made.options == {"offload": True}


@pytest.mark.parametrize(
    ("config", "asynchronous", "in_flight", "recompute", "shares"),
    [
        ({}, None, False, False, False),  # a judge's
        ({}, {"enabled": False}, False, False, True),
        ({"colocated": {"enabled": False}}, {"enabled": False}, False, False, False),
        ({}, {"enabled": True}, True, False, False),
        ({}, {"enabled": True, "recompute_kv_cache_after_weight_updates": True}, True, True, False),
        ({"vllm_cfg": {"expose_http_server": True}}, {"enabled": False}, True, False, True),
    ],
)
def test_vllm_is_told_when_weights_come_and_whether_its_memory_is_wanted(
    config: dict[str, Any],
    asynchronous: dict[str, Any] | None,
    in_flight: bool,
    recompute: bool,
    shares: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("nemotron_steps.engine.generation.vllm.generator.VllmGenerator", Told)
    generation = GenerationConfig.model_validate({"backend": "vllm", **config})
    made: Any = generator.build_generator(
        Path("m"),
        generation,
        CHAT,
        max_total_length=9,
        precision="bfloat16",
        weights=[],
        asynchronous=None if asynchronous is None else AsyncGrpoConfig.model_validate(asynchronous),
        record_routed_experts=True,
    )
    assert made.arguments == (Path("m"), generation.vllm_cfg)
    assert made.options == {
        "max_total_length": 9,
        "precision": "bfloat16",
        "weights": [],
        "in_flight_updates": in_flight,
        "recompute_kv_cache": recompute,
        "shares_device": shares,
        "record_routed_experts": True,
        "options": generation.vllm_kwargs,
    }


def test_the_embedded_generator_has_the_folders_weights_where_none_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr("nemotron_steps.engine.generation.embedded.generator.EmbeddedGenerator", Told)
    monkeypatch.setattr("nemotron_steps.models.architecture.Architecture.from_folder", lambda folder: f"of {folder}")
    monkeypatch.setattr("nemotron_steps.models.huggingface.load_hf_weights", lambda folder: {"w": folder})
    config = GenerationConfig(backend="embedded", max_sequences=3)
    asynchronous = AsyncGrpoConfig(enabled=True, recompute_kv_cache_after_weight_updates=True)

    def made(**more: Any) -> Any:
        return generator.build_generator(Path("m"), config, CHAT, max_total_length=9, precision="float32", **more)

    judge, own = made(), made(weights=[("x", 1)], asynchronous=asynchronous, record_routed_experts=True)
    assert judge.arguments[0] == "of m" and list(judge.arguments[1]) == [("w", Path("m"))]
    assert own.arguments[1] == [("x", 1)]
    shared = {"max_sequences": 3, "max_total_length": 9, "dtype": torch.float32, "eos_token_ids": (5,), "decode": str}
    for generator_made, on in ((judge, False), (own, True)):
        assert generator_made.options.items() >= shared.items()
        assert generator_made.options["recompute_kv_cache"] is generator_made.options["record_routed_experts"] is on


def test_judges_are_built_for_the_roles_that_are_asked_and_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []
    monkeypatch.setattr(judges, "build_judge", lambda role, config, **more: built.append((role, config, more)) or role)
    given = {"responses_api_models": {"vllm_model": {"model": "x"}}}
    gym = NemoGymConfig.model_validate({"judge_model": given, "genrm_model": given})
    sampler: Any = object()
    found = judges.build_judges(gym, {"judge_model", "safety_model"}, defer_to=sampler, seed=3)
    assert found == {"judge_model": "judge_model"}
    assert built == [("judge_model", gym.judge("judge_model"), {"defer_to": sampler, "seed": 3})]


def test_a_judges_folder_is_taken_as_it_is_and_none_is_an_error(tmp_path: Path) -> None:
    given = {"responses_api_models": {"vllm_model": {"model": str(tmp_path)}}}
    config: Any = NemoGymConfig.model_validate({"judge_model": given}).judge("judge_model")
    assert judges.judge_folder("judge_model", config) == tmp_path
    with pytest.raises(ArtifactError, match="has no model") as caught:
        judges.judge_folder("judge_model", config.model_copy(update={"model": None}))
    assert caught.value.where == "env.nemo_gym.judge_model.responses_api_models.vllm_model.model"


def test_what_a_judges_generator_refuses_is_mended_by_the_judges_own_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its hints named the policy's backend, which was embedded already."""

    def refused(*given: Any, **more: Any) -> Any:
        hints = ["policy.generation.backend=embedded", "inputs.policy.overrides=[x=1]   # policy", "pip install x"]
        raise UnsupportedError("no", where="policy.generation.backend=vllm", expected="e", found="f", hints=hints)

    monkeypatch.setattr(judges, "build_generator", refused)
    monkeypatch.setattr(judges, "judge_folder", lambda role, config: Path("j"))
    monkeypatch.setattr(judges.ChatFormat, "from_folder", lambda folder: CHAT)
    with pytest.raises(UnsupportedError, match="judge genrm_model: no") as caught:
        judges.build_judge("genrm_model", VllmModelConfig(model="j", backend="vllm"), defer_to=None, seed=1)
    own = "env.nemo_gym.genrm_model.responses_api_models.vllm_model.backend"
    error = caught.value
    assert (error.where, error.expected, error.found) == (f"{own}=vllm", "e", "f")
    assert error.hints == (f"{own}=embedded", "pip install x")


def test_a_judge_behind_http_is_asked_as_its_config_says_and_for_its_name_where_that_is_left_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[Any] = []

    class Http(Told):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            told.append((arguments, options))

        def wait_until_ready(self, seconds: float) -> None:
            told.append(seconds)

        def ask_for_listed_model(self) -> None:
            told.append("asked")

    monkeypatch.setattr(judges, "HttpJudge", Http)
    for model in ("m", None):
        config = VllmModelConfig(
            backend="http", base_url="http://h/v1", model=model, api_key_env="KEY", max_retries=7, readiness_timeout_s=9
        )
        assert isinstance(judges.build_judge("judge_model", config, defer_to=None, seed=3), Http)
    options = {"api_key_env": "KEY", "retries": 7, "seed": 3}
    url = VllmModelConfig(backend="http", base_url="http://h/v1").base_url
    assert told == [((url, "m"), options), 9, ((url, ""), options), 9, "asked"]


def test_a_judge_of_this_process_has_the_sizes_of_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []
    monkeypatch.setattr(judges, "build_generator", lambda *given, **more: built.append((given, more)) or "generator")
    monkeypatch.setattr(judges.ChatFormat, "from_folder", lambda folder: CHAT)
    config = VllmModelConfig(
        backend="vllm",
        model=str(tmp_path),
        tensor_parallel_size=2,
        gpu_memory_utilization=0.25,
        max_sequences=5,
        max_total_sequence_length=77,
    )
    first: Any = object()
    judge: Any = judges.build_judge("judge_model", config, defer_to=first, seed=3)
    (((folder, generation, chat), more),) = built
    sizes = generation.vllm_cfg
    assert (folder, chat, generation.backend, generation.max_sequences) == (tmp_path, CHAT, "vllm", 5)
    assert (sizes.tensor_parallel_size, sizes.gpu_memory_utilization, sizes.max_num_seqs) == (2, 0.25, 5)
    assert more["max_total_length"] == 77
    assert (judge._sampler.generator, judge._sampler._defer_to, judge._seed, judge._max_total_length) == (
        "generator",
        first,
        3,
        77,
    )
