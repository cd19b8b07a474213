"""The world that most of the resolver's tests plan in."""

from pathlib import Path

import pytest

from nemotron_steps.resolver.plan import SuppliedInput
from tests.resolver.worlds import World, types_of, world_of

TYPES = types_of(
    rows="",
    chats="rows",
    prompts="rows",
    hf={"mega": "convert/up"},
    mega={"hf": "convert/down"},
    judge_hf=("hf", {}),
    report="",
)
STEPS = {
    "prep/chats": "source:rows? -> chats",
    "prep/prompts": "-> prompts",
    "sft": "chats model:mega? -> model:mega",
    "sft_hf": "chats -> model:hf",
    "judge": "chats -> judge:judge_hf",
    "rl": "prompts policy:mega -> model:mega",
    "rlhf": """
[[consumes]]
type = "prompts"
bind = { "data.train" = "train.jsonl", "data.val" = "val.jsonl" }
[[consumes]]
name = "policy"
type = "mega"
bind = "policy.path"
[[consumes]]
name = "judge"
type = "hf"
bind = "judge.path"
auto = "judge_hf"
[[produces]]
name = "model"
type = "mega"
inherits = "policy"
""",
    "eval": "model:hf prompts -> report",
    "convert/up": "hf -> mega",
    "convert/down": "mega -> hf",
}


@pytest.fixture
def world(tmp_path: Path) -> World:
    artifacts = {
        "rows": SuppliedInput("rows", "rows"),
        "chats": SuppliedInput("chats", "chats"),
        "prompts": SuppliedInput("prompts", "prompts"),
        "hf": SuppliedInput("hf", "hf", {"tokenizer": "T1"}),
        "mega": SuppliedInput("mega", "mega", {"tokenizer": "T1"}),
        "judge": SuppliedInput("judge", "judge_hf", {"tokenizer": "T2"}),
        "hub/model": SuppliedInput("hub/model", None),
    }
    return world_of(tmp_path, TYPES, STEPS, artifacts=artifacts)
