"""Which backend a config chooses, and what that one is told."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemotron_steps.config.schema.rl import VllmModelConfig
from nemotron_steps.engine.setup import backends, policy_backends
from nemotron_steps.errors import UnsupportedError

CHAT: Any = SimpleNamespace(end_ids=(5,), decode=str)


def test_teachers_are_for_the_megatron_policy_alone() -> None:
    with pytest.raises(UnsupportedError, match="megatron"):
        policy_backends.build_teachers(object(), {}, topk=None, offload=False)  # type: ignore[arg-type]


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
