"""How rollouts are sampled, from a config and a chat format."""

from __future__ import annotations

from types import SimpleNamespace

from nemotron_steps.config.schema.policy import GenerationConfig
from nemotron_steps.engine.setup.backends import sampling_params


def test_a_chats_end_token_stops_a_sample_beside_the_configs_own() -> None:
    chat = SimpleNamespace(end_ids=(5, 9))
    assert sampling_params(GenerationConfig(), chat, None).stop_token_ids == (5, 9)  # type: ignore[arg-type]
    config = GenerationConfig(
        stop_token_ids=(7, 5), stop_strings=("end",), max_new_tokens=9, top_k=3, top_p=0.5, temperature=0.3
    )
    params = sampling_params(config, chat, 11)  # type: ignore[arg-type]
    assert (params.stop_token_ids, params.stop_strings, params.seed) == ((5, 9, 7), ("end",), 11)
    assert (params.max_new_tokens, params.top_k, params.top_p, params.temperature) == (9, 3, 0.5, 0.3)
