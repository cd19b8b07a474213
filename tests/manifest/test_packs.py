"""Packs are found in four places, read as files only, and one broken file or folder hides nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nemotron_steps.errors import ManifestError
from nemotron_steps.manifest.packs import builtin_pack_root, find_packs
from nemotron_steps.manifest.registry import load_registry
from tests.manifest.packs_on_disk import read_packs, step_text, write_files

TYPES = "[a]\n[b]\n"


def test_order_and_origins(tmp_path: Path) -> None:
    one = write_files(tmp_path / "one", {"manifests/types.toml": TYPES, "manifests/x.toml": step_text("one/x")})
    two = write_files(tmp_path / "two", {"types.toml": TYPES, "two/x/step.toml": step_text("two/x")})
    cwd = write_files(tmp_path / "cwd", {"manifests/y.toml": step_text("cwd/y")})
    search = find_packs(environ={"STEPS_PATH": f"{one}:{two}"}, cwd=cwd, installed=())
    assert [(p.origin, p.base) for p in search.packs] == [
        ("built-in", builtin_pack_root() / "manifests"),
        ("STEPS_PATH", one / "manifests"),
        ("STEPS_PATH", two),
        ("working directory", cwd / "manifests"),
    ]
    registry = load_registry(search)
    assert {"one/x", "two/x", "cwd/y", "rl/nemo_rl/rlhf"} <= set(registry.steps)
    assert not registry.problems


def test_a_folder_reached_twice_is_one_pack(tmp_path: Path) -> None:
    root = write_files(tmp_path / "r", {"manifests/x.toml": step_text("r/x")})
    (tmp_path / "link").symlink_to(root)
    path = f"{root}:{tmp_path / 'link'}:{root / 'manifests'}"
    search = find_packs(environ={"STEPS_PATH": path}, cwd=root, installed=())
    assert [p.name for p in search.packs] == ["nemotron_steps", "r"]
    builtin_again = find_packs(environ={}, cwd=builtin_pack_root(), installed=())
    assert len(builtin_again.packs) == 1


@pytest.mark.parametrize(
    "broken",
    [
        '[step]\nid = "demo/broken"\nunknown = 1\n',
        '[step]\nid = "demo/broken"\nname = "unterminated\n',
    ],
)
def test_a_broken_file_hides_only_itself(tmp_path: Path, broken: str) -> None:
    files = {"manifests/types.toml": TYPES, "manifests/good.toml": step_text("demo/good"), "manifests/bad.toml": broken}
    registry = read_packs(write_files(tmp_path / "p", files))
    assert set(registry.steps) == {"demo/good"}
    assert len(registry.problems) == 1
    assert str(tmp_path / "p/manifests/bad.toml:3") in str(registry.problems[0].where)
    with pytest.raises(ManifestError) as raised:
        registry.step("demo/broken")
    assert raised.value is registry.problems[0]


def test_installed_pack_is_found_without_importing_the_plugin(tmp_path: Path) -> None:
    """A distribution on sys.path whose package fails on import: its manifests are listed all the same."""
    site = write_files(
        tmp_path / "site",
        {
            "exploding_plugin/__init__.py": "raise RuntimeError('imported')\n",
            "exploding_plugin/pack/manifests/x.toml": step_text("plugin/x"),
            "exploding_plugin-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: exploding-plugin\nVersion: 1.0\n",
            "exploding_plugin-1.0.dist-info/entry_points.txt": (
                "[nemotron_steps.packs]\ngood = exploding_plugin.pack\ncolon = exploding_plugin:pack\n"
                "absent = no_such_package\nfolder = exploding_plugin.nothing\n"
            ),
        },
    )
    code = (
        "import sys\n"
        "from nemotron_steps.manifest.packs import find_packs\n"
        "from nemotron_steps.manifest.registry import load_registry\n"
        "r = load_registry(find_packs(environ={}))\n"
        "print('plugin/x' in r.steps, 'exploding_plugin' in sys.modules)\n"
        "print(*sorted(p.what for p in r.problems), sep='\\n')\n"
    )
    environ = {"PYTHONPATH": f"{site}:{builtin_pack_root()}"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environ, cwd=tmp_path, check=True
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "True False"
    assert lines[1:] == [
        "pack 'absent' cannot be located: there is no package 'no_such_package'",
        "pack 'folder' cannot be located: package 'exploding_plugin' has no folder 'nothing'",
    ]


def test_types_of_two_packs_are_merged_and_may_not_contradict(tmp_path: Path) -> None:
    one = write_files(
        tmp_path / "one",
        {
            "manifests/types.toml": "[a]\ndescription = 'A'\nconvert_to = { b = 'c/one' }\n"
            "attributes = { size = 'as one says' }\n[b]\n[c]\n",
            "manifests/one.toml": step_text("c/one", "a", "b"),
            "manifests/two.toml": step_text("c/two", "a", "c"),
        },
    )
    two = write_files(
        tmp_path / "two",
        {
            "manifests/types.toml": "[a]\nis_a = ['c']\nconvert_to = { b = 'c/other', c = 'c/two' }\n"
            "attributes = { size = 'as two says', colour = 'only two says' }\n"
        },
    )
    registry = read_packs(one, two)
    merged = registry.type("a")
    assert (merged.description, merged.is_a, dict(merged.convert_to or {})) == (
        "A",
        ("c",),
        {"b": "c/one", "c": "c/two"},
    )
    assert merged.attributes == {"size": "as one says", "colour": "only two says"}
    assert not registry.problems
    warning = next(w for w in registry.warnings if "converted to 'b'" in w.what)
    assert (warning.expected, warning.found) == ("c/one", "c/other")
    assert str(warning.where) == f"{two / 'manifests/types.toml'}:3"
