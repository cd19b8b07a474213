"""What changed between rows, weights and whole artifacts, read without torch."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import pytest

from nemotron_steps.artifacts import compare as module
from nemotron_steps.artifacts.compare import compare, compare_rows, compare_tensors, config_changes, flat, tensors_of
from nemotron_steps.artifacts.models import Artifact, Edge, short_digest
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import ArtifactError
from tests.artifacts.checkpoint_files import write_safetensors


def rows(path, values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def test_rows_with_ids_are_followed_wherever_they_stand(tmp_path):
    before = [{"id": n, "text": f"row {n}"} for n in range(6)]
    after = [{"id": 9, "text": "new"}, *({**row, "text": "other"} if row["id"] == 4 else row for row in before[1:])]
    changes = compare_rows(rows(tmp_path / "a.jsonl", before), rows(tmp_path / "b.jsonl", after[::-1]))
    assert (changes.same, changes.added, changes.removed, changes.changed) == (4, 1, 1, 1)
    found = {each.kind: each for each in changes.examples}
    assert (found["changed"].line_a, found["changed"].line_b, found["changed"].keys) == (5, 2, ("text",))
    assert found["removed"].text == '{"id": 0, "text": "row 0"}' and found["added"].line_b == 6


def test_rows_without_ids_changed_where_their_line_did_and_repeats_are_counted(tmp_path):
    a = rows(tmp_path / "a.jsonl", [{"x": 1}, {"x": 1}, {"x": 2}])
    b = rows(tmp_path / "b.jsonl", [{"x": 1}, {"x": 3, "y": 0}, {"x": 2}, {"x": 5}])
    changes = compare_rows(a, b)
    assert (changes.same, changes.added, changes.removed, changes.changed) == (2, 1, 0, 1)
    (changed,) = [each for each in changes.examples if each.kind == "changed"]
    assert changed.keys == ("x", "y") and changed.line_a == changed.line_b == 2


def test_the_order_of_keys_is_no_change_and_a_line_that_is_no_json_is_a_row(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": 1, "b": 2}\nnot json\n')
    (tmp_path / "b.jsonl").write_text('{"b": 2, "a": 1}\nnot json either\n')
    changes = compare_rows(tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    assert (changes.same, changes.changed, changes.examples[0].keys) == (1, 1, ())


def weights(folder, tensors):
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / "model.safetensors", tensors)
    return tensors_of(folder)


def test_the_largest_difference_is_found_in_every_chunk(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK", 2)
    a = weights(tmp_path / "a", {"w": [1.0, 2.0, 3.0, 4.0, 5.0], "same": [1.0]})
    b = weights(tmp_path / "b", {"w": [1.0, 2.0, 3.0, 4.0, 5.75], "same": [1.0]})
    changes = compare_tensors(a, b)
    assert changes.differing == {"w": 0.75} and changes.same == 1 and changes.largest == ("w", 0.75)


def test_names_and_shapes_that_differ_are_told(tmp_path):
    a = weights(tmp_path / "a", {"w": [1.0, 2.0], "gone": [1.0]})
    b = weights(tmp_path / "b", {"w": [1.0], "new": [1.0]})
    changes = compare_tensors(a, b)
    assert (changes.only_a, changes.only_b) == (["gone"], ["new"])
    assert changes.reshaped == {"w": ("F32 [2]", "F32 [1]")} and changes.differing == {"w": None}


def test_infinities_and_nans_on_both_sides_are_no_difference_and_on_one_side_are(tmp_path):
    a = weights(tmp_path / "a", {"both": [math.inf, math.nan, -0.0], "one": [1.0]})
    b = weights(tmp_path / "b", {"both": [math.inf, math.nan, 0.0], "one": [math.nan]})
    assert compare_tensors(a, b).differing == {"one": math.inf}


def write_raw(folder, dtype, raw, count):
    folder.mkdir()
    header = json.dumps({"w": {"dtype": dtype, "shape": [count], "data_offsets": [0, len(raw)]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + raw)
    return tensors_of(folder)


def test_brain_floats_are_compared_with_each_other_and_with_floats(tmp_path):
    brain = write_raw(tmp_path / "a", "BF16", struct.pack("<2H", 0x3F80, 0x4000), 2)  # 1, 2
    other = write_raw(tmp_path / "b", "BF16", struct.pack("<2H", 0x3F80, 0x4040), 2)  # 1, 3
    single = weights(tmp_path / "c", {"w": [1.0, 2.0]})
    assert compare_tensors(brain, other).differing == {"w": 1.0}
    across = compare_tensors(brain, single)
    assert across.differing == {} and across.reshaped == {"w": ("BF16 [2]", "F32 [2]")}


@pytest.mark.parametrize(("dtype", "expected"), [("F8_E4M3", None), ("I64", 1.0)])
def test_what_a_double_cannot_hold_is_not_called_the_same(tmp_path, dtype, expected):
    values = [(1 << 62).to_bytes(8, "little"), ((1 << 62) + 1).to_bytes(8, "little")]
    count = 1 if dtype == "I64" else 8
    a, b = (write_raw(tmp_path / name, dtype, raw, count) for name, raw in zip("ab", values, strict=True))
    assert compare_tensors(a, b).differing == {"w": expected} and compare_tensors(a, a).same == 1


def test_three_examples_of_each_kind_are_shown_and_all_are_counted(tmp_path):
    before = [{"id": n, "v": 0} for n in range(10)]
    after = [{"id": n, "v": 1 if n > 4 else 0} for n in range(4, 15)]
    changes = compare_rows(rows(tmp_path / "a.jsonl", before), rows(tmp_path / "b.jsonl", after))
    assert (changes.same, changes.removed, changes.changed, changes.added) == (1, 4, 5, 5)
    shown = [(each.kind, each.line_a, each.line_b) for each in changes.examples]
    assert shown == [
        *(("removed", line, None) for line in (1, 2, 3)),
        *(("changed", line, line - 4) for line in (6, 7, 8)),
        *(("added", None, line) for line in (7, 8, 9)),
    ]


@pytest.mark.parametrize(
    ("before", "after", "changed"),
    [
        ({"id": 1, "uuid": "a", "v": 1}, {"id": 1, "uuid": "b", "v": 2}, 1),
        ({"id": None, "uuid": "a", "v": 1}, {"uuid": "a", "v": 2}, 1),
        ({"id": [1], "task_id": 0, "v": 1}, {"id": [2], "task_id": 0, "v": 2}, 1),
        ({"instance_id": "", "v": 1}, {"instance_id": "", "v": 2}, 1),
        ({"id": 1, "v": 1}, {"id": 2, "v": 1}, 0),
        ({"id": 1, "v": 1}, {"id": "1", "v": 1}, 0),
    ],
)
def test_a_row_is_named_by_its_first_id_that_is_one(tmp_path, before, after, changed):
    b = rows(tmp_path / "b.jsonl", [{"other": 1}, after])
    assert compare_rows(rows(tmp_path / "a.jsonl", [before]), b).changed == changed


def test_tensors_are_told_by_the_largest_difference_first_and_those_of_other_shapes_last(tmp_path):
    a = weights(tmp_path / "a", {"small": [1.0], "shape": [1.0], "large": [1.0, 5.0], "nan": [math.nan]})
    b = weights(tmp_path / "b", {"small": [1.5], "shape": [1.0, 2.0], "large": [4.0, 5.0], "nan": [1.0]})
    changes = compare_tensors(a, b)
    assert list(changes.differing.items()) == [("nan", math.inf), ("large", 3.0), ("small", 0.5), ("shape", None)]
    assert changes.largest == ("nan", math.inf) and module.TensorChanges(differing={"x": None}).largest is None
    assert module.TensorChanges(differing={"x": None, "y": 1.0}).largest == ("y", 1.0)


@pytest.mark.parametrize(
    ("dtype", "one", "other", "apart"),
    [
        ("I8", b"\xff", b"\x01", 2.0),
        ("U8", b"\xff", b"\x01", 254.0),
        ("I16", b"\xff\xff", b"\x01\x00", 2.0),
        ("U16", b"\xff\xff", b"\x01\x00", 65534.0),
        ("BOOL", b"\x00", b"\x01", 1.0),
        ("U64", (1 << 63).to_bytes(8, "little"), ((1 << 63) + 1).to_bytes(8, "little"), 1.0),
        ("F16", struct.pack("<e", 1.0), struct.pack("<e", 1.5), 0.5),
        ("F64", struct.pack("<d", 1.0), struct.pack("<d", 1.5), 0.5),
    ],
)
def test_numbers_of_every_kind_are_read_as_what_they_are(tmp_path, dtype, one, other, apart):
    a, b = (write_raw(tmp_path / name, dtype, raw, 1) for name, raw in zip("ab", (one, other), strict=True))
    assert compare_tensors(a, b).differing == {"w": apart}


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
