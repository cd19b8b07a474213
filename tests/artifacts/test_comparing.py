"""Two artifacts side by side: what differs in each, in the order in which they were named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nemotron_steps.artifacts.compare import compare, config_changes, flat
from nemotron_steps.artifacts.models import Artifact, Edge, short_digest
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import ArtifactError
from tests.artifacts.checkpoint_files import write_safetensors


def commit(store: ArtifactStore, name: str, texts: dict[str, str], **options: Any) -> Artifact:
    with store.staging() as folder:
        (folder / "tree").mkdir()
        for file, text in texts.items():
            (folder / "tree" / file).write_text(text)
        if options.pop("weights", None) is not None:
            write_safetensors(folder / "tree" / "w.safetensors", {"w": options.pop("values")})
        return store.commit(folder / "tree", options.pop("type_name", "export"), name=name, **options)


def test_files_are_told_with_their_sizes_and_rows_where_both_have_some(store: ArtifactStore) -> None:
    commit(store, "a", {"same": "x", "both.jsonl": '{"v": 1}\n', "gone.jsonl": "{}\n", "text": "1"})
    commit(store, "b", {"same": "x", "both.jsonl": '{"v": 10}\n', "new": "12", "text": "123"})
    found = compare(store, "a", "b")
    assert found.files == {"both.jsonl": (9, 10), "gone.jsonl": (3, None), "new": (None, 2), "text": (1, 3)}
    assert list(found.rows) == ["both.jsonl"] and found.rows["both.jsonl"].changed == 1 and found.tensors is None
    assert not found.same
    document = json.loads(json.dumps(found.to_dict()))
    assert document["a"]["ref"] == "a:v1" and document["b"]["ref"] == "b:v1" and document["same"] is False
    assert document["files"]["new"] == [None, 2] and document["rows"]["both.jsonl"]["changed"] == 1


def test_weights_are_compared_where_a_file_of_some_differs(store: ArtifactStore) -> None:
    for name, value, text in (("a", 1.0, "x"), ("b", 1.5, "y"), ("c", 1.0, "z")):
        commit(store, name, {"text": text}, weights=True, values=[value])
    changes = compare(store, "a", "b").tensors
    assert changes is not None and changes.differing == {"w": 0.5}
    assert compare(store, "a", "c").tensors is None and list(compare(store, "a", "c").files) == ["text"]


def test_the_same_files_with_other_attributes_are_not_the_same(store: ArtifactStore) -> None:
    values: dict[str, Any] = {"big": 10**6, "list": [1, 2], "text": "a" * 20}
    commit(store, "a", {"x": "1"}, attributes={**values, "seed": 1, "only": 2})
    commit(store, "b", {"x": "1"}, attributes={**values, "seed": 3, "other": 4})
    found = compare(store, "a", "b")
    assert not found.same and found.files == {} and found.tensors is None
    assert found.attributes == {"only": (2, None), "other": (None, 4), "seed": (1, 3)}
    assert compare(store, "a", "a:v1").same


def test_inputs_differ_by_what_they_hold_and_ancestors_by_what_they_are(store: ArtifactStore) -> None:
    one, two = commit(store, "one", {"x": "1"}), commit(store, "two", {"x": "2"})
    copy = commit(store, "copy", {"x": "1"})
    lost = Edge("lost", "ab" * 32)
    edges = (Edge("rows", one.digest, one.ref), Edge("same", one.digest, one.ref), lost)
    commit(store, "a", {"y": "1"}, inputs=edges)
    commit(store, "b", {"y": "2"}, inputs=(Edge("rows", two.digest, two.ref), Edge("same", copy.digest, copy.ref)))
    found = compare(store, "a", "b")
    assert found.inputs == {"lost": (short_digest("ab" * 32), None), "rows": ("one:v1", "two:v1")}
    assert found.ancestors == (sorted([short_digest("ab" * 32), "one:v1"]), ["copy:v1", "two:v1"])


def test_what_is_broken_or_of_another_type_is_not_compared(store: ArtifactStore) -> None:
    first = commit(store, "a", {"x": "1"})
    commit(store, "b", {"x": "2"})
    commit(store, "c", {"x": "1"}, type_name="other")
    with pytest.raises(ArtifactError, match="different types") as caught:
        compare(store, "a", "c")
    assert caught.value.found == "export and other" and caught.value.where == "a:v1 and c:v1"
    (first.path / "x").chmod(0o644)
    (first.path / "x").write_text("3")
    for pair in (("a", "b"), ("b", "a")):
        with pytest.raises(ArtifactError, match="corrupt"):
            compare(store, *pair)


def test_configs_differ_by_dotted_keys_and_an_empty_group_is_a_value() -> None:
    a: dict[str, Any] = {"x": {"y": 1, "z": {}}, "l": [1]}
    b: dict[str, Any] = {"x": {"y": 2, "z": {"k": 0}}, "l": [1]}
    assert flat(a) == {"x.y": 1, "x.z": {}, "l": [1]} and flat({}) == {}
    assert config_changes(a, b) == {"x.y": (1, 2), "x.z": ({}, None), "x.z.k": (None, 0)}
    assert config_changes(a, {**a, "l": [1]}) == {}
