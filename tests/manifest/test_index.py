"""The cached index answers like the manifests themselves, is fast, and notices every change."""

import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from nemotron_steps.manifest.index import Index, PortRow, StepRow, build_index, load_index
from nemotron_steps.manifest.packs import builtin_pack_root, find_packs
from nemotron_steps.manifest.typegraph import TypeGraph
from tests.manifest.packs_on_disk import step_text, write_files


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    files = {"types.toml": "[a]\n[b]\nis_a = ['a']\n", "one/step.toml": step_text("one", "a", "b")}
    return write_files(tmp_path / "pack", files)


def load(tmp_path: Path, pack: Path) -> Index:
    return load_index(environ={"STEPS_PATH": str(pack)}, cwd=tmp_path, cache_dir=tmp_path / "cache")


def content(index: Index) -> tuple[object, ...]:
    problems = tuple(p.render() for p in (*index.problems, *index.warnings))
    return index.steps, index.pipelines, index.types.types, problems


def test_second_load_comes_from_the_cache_and_says_the_same(tmp_path: Path, pack: Path) -> None:
    (pack / "bad").mkdir()
    (pack / "bad/step.toml").write_text("[step]\n")
    first, second = load(tmp_path, pack), load(tmp_path, pack)
    assert not first.from_cache and second.from_cache
    assert content(first) == content(second)
    fresh = build_index(find_packs(environ={"STEPS_PATH": str(pack)}, cwd=tmp_path))
    assert content(fresh) == content(second)
    assert [p.what for p in second.problems] == ["'step.id' is missing"]
    assert {row.runnable for row in second.steps if row.id == "one"} == {False}


def test_every_change_is_noticed(tmp_path: Path, pack: Path) -> None:
    def ids() -> set[str]:
        index = load(tmp_path, pack)
        assert not index.from_cache
        return {row.id for row in index.steps if row.pack == "pack"}

    assert ids() == {"one"}
    write_files(pack, {"two/step.toml": step_text("two")})
    assert ids() == {"one", "two"}
    status = (pack / "two/step.toml").stat()
    (pack / "two/step.toml").write_text(step_text("owt"))  # same size; only the time tells
    os.utime(pack / "two/step.toml", ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert ids() == {"one", "owt"}
    (pack / "one/step.toml").unlink()
    assert ids() == {"owt"}
    write_files(tmp_path, {"manifests/here.toml": step_text("here")})
    index = load(tmp_path, pack)
    assert not index.from_cache and "here" in {row.id for row in index.steps}
    assert load(tmp_path, pack).from_cache


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"format": 1}', "\x00"])
def test_a_damaged_cache_is_rebuilt(tmp_path: Path, pack: Path, damage: str) -> None:
    load(tmp_path, pack)
    (cache,) = (tmp_path / "cache").iterdir()
    cache.write_text(damage)
    assert not load(tmp_path, pack).from_cache
    assert load(tmp_path, pack).from_cache


def test_installing_a_distribution_is_noticed(tmp_path: Path, pack: Path) -> None:
    """And nothing else that is written beside it, or into a checkout that is installed as it lies."""
    site = tmp_path / "site"
    site.mkdir()
    code = (
        "from pathlib import Path\nfrom nemotron_steps.manifest.index import load_index\n"
        f"i = load_index(environ={{}}, cwd=Path({str(tmp_path)!r}), cache_dir=Path({str(tmp_path / 'cache')!r}))\n"
        "print(i.from_cache, any(r.id == 'plugin/x' for r in i.steps))\n"
    )

    def run() -> str:
        environ = {"PYTHONPATH": f"{site}:{builtin_pack_root()}"}
        done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    assert run() == "False False"
    (site / "notes.txt").touch()
    assert run() == "True False"
    write_files(
        site,
        {
            "plugin/pack/manifests/x.toml": step_text("plugin/x"),
            "plugin-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: plugin\nVersion: 1\n",
            "plugin-1.dist-info/entry_points.txt": "[nemotron_steps.packs]\nplugin = plugin.pack\n",
            "plugin/__init__.py": "",
        },
    )
    assert run() == "False True"
    assert run() == "True True"
    # Another of the same name and version in its place.
    (site / "plugin-1.dist-info/entry_points.txt").write_text("")
    os.utime(site / "plugin-1.dist-info", (1, 1))
    assert run() == "False False"


def test_a_warm_load_is_fast(tmp_path: Path, pack: Path) -> None:
    load(tmp_path, pack)
    times = []
    for _ in range(15):
        start = time.process_time()
        assert load(tmp_path, pack).from_cache
        times.append(1000 * (time.process_time() - start))
    assert statistics.median(times) < 10, times


def row(step_id: str, pack: str, *, consumes: str = "", produces: str = "") -> StepRow:
    def ports(names: str) -> tuple[PortRow, ...]:
        return tuple(PortRow(name, name, True) for name in names.split())

    return StepRow(step_id, "", step_id.rpartition("/")[0], "", (), ports(consumes), ports(produces), pack, "f", True)


def test_a_row_is_found_by_its_id_and_by_its_packs_name_before_it() -> None:
    rows = (row("a/x", "one", produces="a b"), row("two:a/x", "two", consumes="a b"), row("ab/y", "two"))
    rows = (rows[0], replace(rows[1], aliases=("z",)), replace(rows[2], aliases=("y", "ab/y")))
    index = Index(rows, (), TypeGraph())
    asked = ("a/x", "one:a/x", "two:a/x", "two:ab/y", "Y", "one:ab/y", "x", "z")
    assert [index.step(name) for name in asked] == [rows[0], rows[0], rows[1], rows[2], rows[2], None, None, None]
    assert [each.plain_id for each in rows] == ["a/x", "a/x", "ab/y"]
    assert index.select(category="a") == rows[:1] and index.select(category="ab") == rows[2:]
    assert index.select(produces="b") == rows[:1] and index.select(consumes="b") == rows[1:2]
