"""What an artifact is called, and which file of its folder is which split."""

from pathlib import Path

import pytest

from nemotron_steps.artifacts.models import Artifact, FileRecord, is_artifact_name, parse_ref, tree_digest
from nemotron_steps.errors import ArtifactError


@pytest.mark.parametrize(
    ("split", "names"),
    [
        ("train", ["train.jsonl", "train-split.jsonl", "train/data.jsonl", "alone.jsonl"]),
        (
            "validation",
            ["validation.jsonl", "validation-split.jsonl", "val.jsonl", "val-split.jsonl", "val/data.jsonl"],
        ),
        ("heldout", ["heldout.jsonl", "heldout/data.jsonl", "test.jsonl", "test-split.jsonl", "test/data.jsonl"]),
    ],
)
def test_a_split_goes_by_several_names_in_order(split: str, names: list[str], tmp_path: Path) -> None:
    artifact = Artifact("training_jsonl", "0" * 64, tmp_path)
    for name in reversed(names):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
        assert artifact.jsonl(split) == tmp_path / name


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("a:", ("a", "latest")),
        ("a/b:v1", ("a/b", "v1")),
        ("a:12", ("a", "v12")),
        ("a:v999999999", ("a", "v999999999")),
        ("a:v1000000000", None),
        ("a:0", None),
        ("a:²", None),
    ],
)
def test_a_reference_is_a_name_and_a_version(text: str, parsed: tuple[str, str] | None) -> None:
    if parsed is not None:
        assert parse_ref(text) == parsed
    else:
        with pytest.raises(ArtifactError, match="not an artifact reference"):
            parse_ref(text)


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("0.a_b-c/D", True),
        ("a" * 201, False),
        ("a/", False),
        ("a//b", False),
        ("a/..", False),
        ("a\n", False),
        ("ä", False),
    ],
)
def test_a_name_is_of_plain_parts(text: str, is_one: bool) -> None:
    assert is_artifact_name(text) == is_one


def test_a_digest_is_of_type_paths_and_contents_and_of_nothing_else() -> None:
    files = [FileRecord("a", 1, "1"), FileRecord("b", 2, "2")]
    digest = tree_digest("t", files)
    assert tree_digest("t", [FileRecord("b", 9, "2"), files[0]]) == digest
    others = [("u", files), ("t", files[:1]), ("t", [FileRecord("a1", 1, ""), files[1]])]
    assert len({digest, *(tree_digest(name, each) for name, each in others)}) == 4
