"""What config.json says of layers and sizes, and what no model can have."""

from typing import Any

import pytest

from nemotron_steps.config.families import LARGEST, LISTED, misdescribed, pattern_of


@pytest.mark.parametrize(
    ("config", "pattern"),
    [
        ({"hybrid_override_pattern": "ME*-"}, "ME*-"),
        ({"hybrid_override_pattern": "MX"}, "M?"),
        ({"layers_block_type": ["mamba", "linear_attention", "moe", "attention", "full_attention", "mlp"]}, "MME**-"),
        ({"layers_block_type": None, "hybrid_override_pattern": "M"}, "M"),
        ({"layers_block_type": ["moe"], "hybrid_override_pattern": "M"}, "E"),
    ],
)
def test_layers_are_read_from_a_list_of_names_or_else_a_string(config: dict[str, Any], pattern: str) -> None:
    assert pattern_of(config) == pattern
    renamed = {"a": config.get("layers_block_type"), "b": config.get("hybrid_override_pattern")}
    assert pattern_of(renamed, "a", "b") == pattern


PATTERN = {"hybrid_override_pattern": "ME*-", "num_hidden_layers": 4, "hidden_size": 64}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, []),
        ({"hybrid_override_pattern": "MM*-", "n_routed_experts": 0, "moe_intermediate_size": None}, []),
        ({"hybrid_override_pattern": "MX*-"}, [("layers of a kind that does not exist", "MX*-")]),
        (
            {"num_hidden_layers": 5},
            [("a layer pattern of another length than num_hidden_layers", "4: ME*-")],
        ),
        ({"hidden_size": "64"}, [("a hidden_size that is not a count", '"64"')]),
        (
            {"n_groups": 0, "chunk_size": -1},
            [("an n_groups that is not a count", "0"), ("a chunk_size that is not a count", "-1")],
        ),
        ({"vocab_size": LARGEST + 1}, [("a vocab_size that is not a count", "2147483648")]),
    ],
)
def test_what_no_hybrid_can_be_is_told(changes: dict[str, Any], told: list[tuple[str, str]]) -> None:
    assert [(what, found) for what, _, found in misdescribed({**PATTERN, **changes}, "hybrid")] == told


@pytest.mark.parametrize(
    ("kind", "changes", "told"),
    [
        ("mixture", {"num_experts": LISTED, "num_local_experts": None, "intermediate_size": 0}, []),
        ("dense", {"num_hidden_layers": LISTED + 1}, [("a num_hidden_layers that is not a count", str(LISTED + 1))]),
        ("dense", {"head_dim": "16"}, [("a head_dim that is not a count", '"16"')]),
        ("dense", {"tie_word_embeddings": "false"}, [("a tie_word_embeddings that is not true or false", '"false"')]),
        ("mixture", {"num_experts": -4}, [("a num_experts that is not a count", "-4")]),
    ],
)
def test_what_no_model_of_equal_layers_can_be_is_told(
    kind: str, changes: dict[str, Any], told: list[tuple[str, str]]
) -> None:
    shape = {"num_hidden_layers": 4, "hidden_size": 64, "tie_word_embeddings": True, **changes}
    assert [(what, found) for what, _, found in misdescribed(shape, kind)] == told
