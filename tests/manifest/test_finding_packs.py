"""Where packs are looked for, what they are called, and which of their files count."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from nemotron_steps.manifest import packs as module
from nemotron_steps.manifest.packs import InstalledPack, find_installed, find_packs, open_pack
from tests.manifest.packs_on_disk import step_text, write_files


def found(cwd: Path, path: str = "", installed: tuple[InstalledPack, ...] = ()) -> list[tuple[str, str, Path]]:
    search = find_packs(environ={"STEPS_PATH": path}, cwd=cwd, installed=installed)
    return [(pack.name, pack.origin, pack.base) for pack in search.packs[1:]]


def problems(cwd: Path, path: str = "", installed: tuple[InstalledPack, ...] = ()) -> list[tuple[str, str | None]]:
    search = find_packs(environ={"STEPS_PATH": path}, cwd=cwd, installed=installed)
    return [(problem.what, problem.where) for problem in search.problems]


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


def test_packs_of_distributions_are_located_by_folder_and_sorted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(
        tmp_path, {"toy_pack_one/__init__.py": "raise RuntimeError", "toy_pack_one/deep/in/x.toml": step_text("x")}
    )
    (tmp_path / "toy_pack_two").mkdir()  # a namespace
    (tmp_path / "toy_module.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    values = {
        ("b", "z"): "toy_pack_one.deep.in",
        ("b", "a"): "toy_pack_one:deep/in",
        ("a", "y"): " toy_pack_one : deep.in ",
        ("a", "x"): "toy_pack_one",
        ("c", "n"): "toy_pack_one.deep.out",
        ("c", "o"): "toy_module",
        ("c", "p"): "toy_pack_two",
        ("c", "q"): "",
    }
    points = [
        SimpleNamespace(name=name, value=value, dist=SimpleNamespace(name=distribution))
        for (distribution, name), value in values.items()
    ]
    points.append(SimpleNamespace(name="loose", value="toy_pack_one.deep", dist=None))
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: points if group == module.ENTRY_POINT_GROUP else ()
    )
    one = tmp_path / "toy_pack_one"
    listed = [(pack.distribution, pack.name, pack.folder) for pack in find_installed()]
    assert listed == [
        ("?", "loose", str(one / "deep")),
        ("a", "x", str(one)),
        ("a", "y", str(one / "deep/in")),
        ("b", "a", str(one / "deep/in")),
        ("b", "z", str(one / "deep/in")),
        ("c", "n", None),
        ("c", "o", None),
        ("c", "p", str(tmp_path / "toy_pack_two")),
        ("c", "q", None),
    ]
    told = {pack.name: pack.problem for pack in find_installed() if pack.problem is not None}
    assert told["n"] == "package 'toy_pack_one' has no folder 'deep/out'"
    assert told["o"] == "there is no package 'toy_module'" and told["q"].startswith("package '' cannot be found")
    assert "toy_pack_one" not in sys.modules
