"""Which backend a config chooses, and what that one is told."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemotron_steps.config.schema.grpo import AsyncGrpoConfig
from nemotron_steps.config.schema.policy import GenerationConfig
from nemotron_steps.config.schema.rl import NemoGymConfig, VllmModelConfig
from nemotron_steps.engine.setup import backends
from nemotron_steps.engine.setup.backends import sampling_params
from nemotron_steps.errors import ArtifactError, UnsupportedError

CHAT: Any = SimpleNamespace(end_ids=(5,), decode=str)


class Told:
    """Stands for a backend: notes how it is made."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.arguments, self.options = arguments, options


def test_teachers_are_for_the_megatron_policy_alone() -> None:
    with pytest.raises(UnsupportedError, match="megatron"):
        backends.build_teachers(object(), {}, topk=None, offload=False)  # type: ignore[arg-type]


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
    made: Any = backends.build_generator(
        Path("m"),
        generation,
        CHAT,
        max_total_length=9,
        precision="bfloat16",
        weights=[],
        asynchronous=None if asynchronous is None else AsyncGrpoConfig.model_validate(asynchronous),
        record_routed_experts=True,
    )
    found = [made.options[name] for name in ("in_flight_updates", "recompute_kv_cache", "shares_device")]
    assert found == [in_flight, recompute, shares] and made.options["record_routed_experts"]


def test_a_judges_folder_is_taken_as_it_is_and_none_is_an_error(tmp_path: Path) -> None:
    given = {"responses_api_models": {"vllm_model": {"model": str(tmp_path)}}}
    config: Any = NemoGymConfig.model_validate({"judge_model": given}).judge("judge_model")
    assert backends.judge_folder("judge_model", config) == tmp_path
    with pytest.raises(ArtifactError, match="has no model") as caught:
        backends.judge_folder("judge_model", config.model_copy(update={"model": None}))
    assert caught.value.where == "env.nemo_gym.judge_model.responses_api_models.vllm_model.model"


def test_what_a_judges_generator_refuses_is_mended_by_the_judges_own_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its hints named the policy's backend, which was embedded already."""

    def refused(*given: Any, **more: Any) -> Any:
        hints = ["policy.generation.backend=embedded", "inputs.policy.overrides=[x=1]   # policy", "pip install x"]
        raise UnsupportedError("no", where="policy.generation.backend=vllm", expected="e", found="f", hints=hints)

    monkeypatch.setattr(backends, "build_generator", refused)
    monkeypatch.setattr(backends, "judge_folder", lambda role, config: Path("j"))
    monkeypatch.setattr(backends.ChatFormat, "from_folder", lambda folder: CHAT)
    with pytest.raises(UnsupportedError, match="judge genrm_model: no") as caught:
        backends.build_judge("genrm_model", VllmModelConfig(model="j", backend="vllm"), defer_to=None, seed=1)
    own = "env.nemo_gym.genrm_model.responses_api_models.vllm_model.backend"
    error = caught.value
    assert (error.where, error.expected, error.found) == (f"{own}=vllm", "e", "f")
    assert error.hints == (f"{own}=embedded", "pip install x")


def test_a_judge_of_this_process_has_the_sizes_of_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []
    monkeypatch.setattr(backends, "build_generator", lambda *given, **more: built.append((given, more)) or "generator")
    monkeypatch.setattr(backends.ChatFormat, "from_folder", lambda folder: CHAT)
    config = VllmModelConfig(
        backend="vllm",
        model=str(tmp_path),
        tensor_parallel_size=2,
        gpu_memory_utilization=0.25,
        max_sequences=5,
        max_total_sequence_length=77,
    )
    first: Any = object()
    judge: Any = backends.build_judge("judge_model", config, defer_to=first, seed=3)
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


def test_a_chats_end_token_stops_a_sample_beside_the_configs_own() -> None:
    chat = SimpleNamespace(end_ids=(5, 9))
    assert sampling_params(GenerationConfig(), chat, None).stop_token_ids == (5, 9)  # type: ignore[arg-type]
    config = GenerationConfig(
        stop_token_ids=(7, 5), stop_strings=("end",), max_new_tokens=9, top_k=3, top_p=0.5, temperature=0.3
    )
    params = sampling_params(config, chat, 11)  # type: ignore[arg-type]
    assert (params.stop_token_ids, params.stop_strings, params.seed) == ((5, 9, 7), ("end",), 11)
    assert (params.max_new_tokens, params.top_k, params.top_p, params.temperature) == (9, 3, 0.5, 0.3)
