"""Packs are found in four places, read as files only, and one broken file or folder hides nothing else."""

from pathlib import Path

import pytest

from nemotron_steps.errors import ManifestError
from nemotron_steps.manifest import packs as module
from nemotron_steps.manifest.packs import builtin_pack_root, find_packs, open_pack
from nemotron_steps.manifest.registry import load_registry
from tests.manifest.packs_on_disk import read_packs, step_text, write_files

TYPES = "[a]\n[b]\n"


def test_order_and_origins(tmp_path: Path) -> None:
    one = write_files(tmp_path / "one", {"manifests/types.toml": TYPES, "manifests/x.toml": step_text("one/x")})
    two = write_files(tmp_path / "two", {"types.toml": TYPES, "two/x/step.toml": step_text("two/x")})
    cwd = write_files(tmp_path / "cwd", {"manifests/y.toml": step_text("cwd/y")})
    search = find_packs(environ={"STEPS_PATH": f"{one}:{two}"}, cwd=cwd, installed=False)
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
    search = find_packs(environ={"STEPS_PATH": path}, cwd=root, installed=False)
    assert [p.name for p in search.packs] == ["nemotron_steps", "r"]
    builtin_again = find_packs(environ={}, cwd=builtin_pack_root(), installed=False)
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


def test_two_of_one_id_in_a_pack_are_its_mistake_and_touch_no_other_pack(tmp_path: Path) -> None:
    one = write_files(tmp_path / "one", {"manifests/types.toml": TYPES, "manifests/a.toml": step_text("demo/x")})
    files = {
        "manifests/b.toml": "# differs\n" + step_text("demo/x"),
        "manifests/c.toml": "# again\n" + step_text("demo/x"),
    }
    two = write_files(tmp_path / "two", {**files, "manifests/d.toml": step_text("demo/y")})
    registry = read_packs(one, two)
    (problem,) = registry.problems
    assert problem.what == "two files of pack 'two' define step 'demo/x'"
    assert str(two / "manifests/b.toml:3") in str(problem.where)
    assert str(two / "manifests/c.toml:3") in str(problem.where)
    assert set(registry.steps) == {"demo/x", "demo/y"} and registry.step("demo/x").pack == "one"
    with pytest.raises(ManifestError, match="two files of pack 'two'"):
        registry.step("two:demo/x")


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
