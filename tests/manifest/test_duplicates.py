"""Packs that share ids: the first pack keeps the plain id, every other step is PACK:ID, and nothing breaks."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemotron_steps.errors import ManifestError
from nemotron_steps.manifest.index import build_index
from nemotron_steps.manifest.packs import PackSearch, find_packs
from nemotron_steps.manifest.registry import load_registry
from tests.manifest.packs_on_disk import read_packs, step_text, write_files
from tests.manifest.public_pack import SHARED, public_pack

TYPES = "[a]\n[b]\n"
OTHER = "# differs\n"


def beside_the_built_in(tmp_path: Path, *roots: Path) -> PackSearch:
    path = ":".join(str(root) for root in roots)
    return find_packs(environ={"STEPS_PATH": path}, cwd=tmp_path, installed=())


def test_two_of_one_id_in_a_pack_are_its_mistake_and_touch_no_other_pack(tmp_path: Path) -> None:
    one = write_files(tmp_path / "one", {"manifests/types.toml": TYPES, "manifests/a.toml": step_text("demo/x")})
    files = {"manifests/b.toml": OTHER + step_text("demo/x"), "manifests/c.toml": "# again\n" + step_text("demo/x")}
    two = write_files(tmp_path / "two", {**files, "manifests/d.toml": step_text("demo/y")})
    registry = read_packs(one, two)
    (problem,) = registry.problems
    assert problem.what == "two files of pack 'two' define step 'demo/x'"
    assert str(two / "manifests/b.toml:3") in str(problem.where)
    assert str(two / "manifests/c.toml:3") in str(problem.where)
    assert set(registry.steps) == {"demo/x", "demo/y"} and registry.step("demo/x").pack == "one"
    with pytest.raises(ManifestError, match="two files of pack 'two'"):
        registry.step("two:demo/x")


def test_the_public_steps_are_all_there_beside_ours(tmp_path: Path) -> None:
    search = beside_the_built_in(tmp_path, public_pack(tmp_path))
    registry = load_registry(search)
    assert not registry.problems
    public = [*registry.steps.values(), *registry.hidden_steps.values()]
    assert len([step for step in public if step.pack == "public"]) == 24
    assert set(registry.hidden_steps) == {f"public:{step_id}" for step_id in SHARED}
    assert all(registry.step(step_id).pack == "nemotron_steps" for step_id in SHARED)
    assert registry.types.is_a("filtered_jsonl", "training_jsonl")
    assert registry.types.is_a("rl_prompts", "training_jsonl")
    index = build_index(search)
    assert {row.id for row in index.steps} == {step.id for step in public}
    row = index.step("public:rl/nemo_rl/rlhf")
    assert row is not None and not row.runnable and row.plain_id == "rl/nemo_rl/rlhf"
    ours = index.step("nemotron_steps:rl/nemo_rl/rlhf")
    assert ours is not None and ours.id == "rl/nemo_rl/rlhf"
