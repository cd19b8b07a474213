"""Paths of records: which are plain, and where links may lead. What a store makes of them: test_links."""

from pathlib import Path

import pytest

from nemotron_steps.artifacts.files import confined, is_run_id, require_relative, walk
from nemotron_steps.errors import ArtifactError

LONG = "ü" * 127


@pytest.mark.parametrize(
    ("path", "plain"),
    [
        ("a", True),
        ("a/b.c/..d", True),
        ("", False),
        ("/a", False),
        ("a/", False),
        ("a//b", False),
        ("a/../b", False),
        ("..", False),
        ("./a", False),
        ("a/.", False),
        ("a\nb", False),
        ("a\x7fb", False),
        ("a\udcffb", False),
        (LONG + "x", True),
        (LONG + "xy", False),
        ("/".join(["x" * 255] * 15 + ["x" * 127, "x" * 128]), True),
        ("/".join(["x" * 255] * 16) + "/x", False),
        ("/".join(["ü" * 127] * 17), False),
    ],
)
def test_a_plain_path_goes_down_in_parts_that_a_file_system_takes(path: str, plain: bool) -> None:
    if plain:
        assert require_relative(path, "here") == path
    else:
        with pytest.raises(ArtifactError, match="leaves its folder") as caught:
            require_relative(path, "here")
        assert caught.value.where == "here" and len(str(caught.value.found)) < 200


@pytest.mark.parametrize(
    ("text", "is_one"),
    [("r", True), ("20260101-120000-ab.c", True), ("x" * 200, True), ("x" * 201, False), ("", False)],
)
def test_a_run_is_named_like_a_folder(text: str, is_one: bool) -> None:
    assert is_run_id(text) == is_one
    assert not is_run_id(f".{text}") and not is_run_id(f"-{text}") and not is_run_id(f"{text}/x")


def test_the_first_folder_of_a_home_may_be_a_link_and_is_itself_confined(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "artifacts").symlink_to(tmp_path / "disk")
    for path in ("artifacts", "artifacts/x/y"):
        assert confined(tmp_path / "home", path) == tmp_path / "home" / path


@pytest.mark.parametrize("linked", [False, True])
def test_a_file_whose_name_holds_a_control_character_is_refused(linked: bool, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("x")
    odd = tmp_path / "a\nb"
    odd.symlink_to("train.jsonl") if linked else odd.write_text("x")
    with pytest.raises(ArtifactError, match="control characters"):
        list(walk(tmp_path, follow=tmp_path))
