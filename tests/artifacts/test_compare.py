"""What changed between artifacts and between their configs."""

from typing import Any

import pytest

from nemotron_steps.artifacts.compare import compare, config_changes
from nemotron_steps.artifacts.models import Artifact, Edge, short_digest
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import ArtifactError


def commit(store: ArtifactStore, name: str, texts: dict[str, str], **options: Any) -> Artifact:
    with store.staging() as folder:
        (folder / "tree").mkdir()
        for file, text in texts.items():
            (folder / "tree" / file).write_text(text)
        return store.commit(folder / "tree", options.pop("type_name", "export"), name=name, **options)


def test_what_is_broken_or_of_another_type_is_not_compared(store: ArtifactStore) -> None:
    first = commit(store, "a", {"x": "1"})
    commit(store, "b", {"x": "2"})
    commit(store, "c", {"x": "1"}, type_name="other")
    with pytest.raises(ArtifactError, match="different types"):
        compare(store, "a", "c")
    (first.path / "x").chmod(0o644)
    (first.path / "x").write_text("3")
    for pair in (("a", "b"), ("b", "a")):
        with pytest.raises(ArtifactError, match="corrupt"):
            compare(store, *pair)


def test_inputs_differ_by_name_or_by_digest(store: ArtifactStore) -> None:
    one = commit(store, "one", {"x": "1"})
    commit(store, "a", {"y": "1"}, inputs=(Edge("rows", one.digest, one.ref), Edge("lost", "ab" * 32)))
    commit(store, "b", {"y": "2"})
    assert compare(store, "a", "b")["inputs"] == {"lost": (short_digest("ab" * 32), None), "rows": ("one:v1", None)}


def test_configs_differ_by_dotted_keys_and_an_empty_group_is_a_value() -> None:
    a: dict[str, Any] = {"x": {"y": 1, "z": {}}, "l": [1]}
    b: dict[str, Any] = {"x": {"y": 2, "z": {"k": 0}}, "l": [1]}
    assert config_changes(a, b) == {"x.y": (1, 2), "x.z": ({}, None), "x.z.k": (None, 0)}
    assert config_changes(a, {**a, "l": [1]}) == {}
