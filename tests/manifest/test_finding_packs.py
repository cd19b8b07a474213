"""Where packs are looked for, what they are called, and which of their files count."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemotron_steps.manifest import packs as module
from nemotron_steps.manifest.packs import open_pack
from tests.manifest.packs_on_disk import write_files


def test_files_are_told_in_order_and_those_of_other_things_left_out(tmp_path: Path) -> None:
    names = [f"{letter}{number:02}/x.toml" for letter in "ba" for number in reversed(range(8))]
    names += [f"m{number:02}.toml" for number in reversed(range(8))]
    skipped = [f"{folder}/x.toml" for folder in ("__pycache__", "config", "configs", "node_modules", "site-packages")]
    skipped += [".git/x.toml", "a00/configs/x.toml", "pyproject.toml", "notes.md", "a00/pyproject.toml"]
    write_files(tmp_path, dict.fromkeys((*names, *skipped), ""))
    listed = [path.relative_to(tmp_path).as_posix() for path in open_pack(tmp_path, "p", "test").files()]
    assert listed == [f"m{n:02}.toml" for n in range(8)] + [f"{c}{n:02}/x.toml" for c in "ab" for n in range(8)]


def test_a_wheel_brings_the_pack_inside_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "__file__", str(tmp_path / "site/nemotron_steps/manifest/packs.py"))
    assert module.builtin_pack_root() == tmp_path / "site"
    (tmp_path / "site/nemotron_steps/_pack").mkdir(parents=True)
    assert module.builtin_pack_root() == tmp_path / "site/nemotron_steps/_pack"
