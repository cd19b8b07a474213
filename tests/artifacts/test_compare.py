"""What changed between weights and configs, read without torch."""

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.artifacts import compare as module
from nemotron_steps.artifacts.compare import compare, compare_tensors, config_changes
from nemotron_steps.artifacts.models import Artifact, Edge, short_digest
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import ArtifactError
from tests.artifacts.checkpoint_files import write_safetensors


def weights(folder: Path, tensors: dict[str, list[float]]) -> Path:
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def test_tensors_are_told_by_the_largest_difference_first_and_those_of_other_shapes_last(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK", 2)
    equal = {"same": [math.inf, math.nan, -0.0]}
    a = {"small": [1.0], "shape": [1.0], "large": [1.0, 2.0, 3.0, 4.0, 5.0], "nan": [math.nan], "gone": [1.0], **equal}
    b = {"small": [1.5], "shape": [1.0, 2.0], "large": [1.0, 2.0, 3.0, 4.0, 8.0], "nan": [1.0], "new": [1.0], **equal}
    changes = compare_tensors(weights(tmp_path / "a", a), weights(tmp_path / "b", b))
    assert list(changes.differing.items()) == [("nan", math.inf), ("large", 3.0), ("small", 0.5), ("shape", None)]
    assert (changes.only_a, changes.only_b, changes.same) == (["gone"], ["new"], 1)
    assert changes.reshaped == {"shape": ("F32 [1]", "F32 [2]")}


def write_raw(folder: Path, dtype: str, raw: bytes, count: int) -> Path:
    folder.mkdir()
    header = json.dumps({"w": {"dtype": dtype, "shape": [count], "data_offsets": [0, len(raw)]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + raw)
    return folder


@pytest.mark.parametrize(
    ("dtype", "one", "other", "apart"),
    [
        ("F8_E4M3", b"\x00", b"\x01", None),
        ("I16", b"\xff\xff", b"\x01\x00", 2.0),
        ("BOOL", b"\x00", b"\x01", 1.0),
        ("U64", (1 << 63).to_bytes(8, "little"), ((1 << 63) + 1).to_bytes(8, "little"), 1.0),
        ("BF16", struct.pack("<H", 0x4000), struct.pack("<H", 0x4040), 1.0),
        ("F16", struct.pack("<e", 1.0), struct.pack("<e", 1.5), 0.5),
    ],
)
def test_numbers_of_every_kind_are_read_as_what_they_are(tmp_path, dtype, one, other, apart):
    a, b = (write_raw(tmp_path / name, dtype, raw, 1) for name, raw in zip("ab", (one, other), strict=True))
    assert compare_tensors(a, b).differing == {"w": apart} and compare_tensors(a, a).same == 1


def commit(store: ArtifactStore, name: str, texts: dict[str, str], **options: Any) -> Artifact:
    with store.staging() as folder:
        (folder / "tree").mkdir()
        for file, text in texts.items():
            (folder / "tree" / file).write_text(text)
        if "weights" in options:
            write_safetensors(folder / "tree" / "w.safetensors", {"w": options.pop("weights")})
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
    assert compare(store, "a", "b").inputs == {"lost": (short_digest("ab" * 32), None), "rows": ("one:v1", None)}


def test_configs_differ_by_dotted_keys_and_an_empty_group_is_a_value() -> None:
    a: dict[str, Any] = {"x": {"y": 1, "z": {}}, "l": [1]}
    b: dict[str, Any] = {"x": {"y": 2, "z": {"k": 0}}, "l": [1]}
    assert config_changes(a, b) == {"x.y": (1, 2), "x.z": ({}, None), "x.z.k": (None, 0)}
    assert config_changes(a, {**a, "l": [1]}) == {}
