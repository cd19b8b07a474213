"""What packs make together: copies, hidden ones, pipelines and converters."""

from pathlib import Path

import pytest

from nemotron_steps.errors import ManifestError, UnknownNameError
from nemotron_steps.manifest.registry import Registry
from tests.manifest.packs_on_disk import read_packs, step_text, write_files

TYPES = "[a]\n[b]\n"
PIPELINE = '[pipeline]\nname = "{}"\n[[stages]]\nstep = "demo/x"\n'


def packs(tmp_path: Path, **files: dict[str, str]) -> Registry:
    """One pack for each keyword, in that order; `manifests/` is put before each name."""
    roots = [
        write_files(tmp_path / pack, {f"manifests/{name}.toml": text for name, text in each.items()})
        for pack, each in files.items()
    ]
    return read_packs(*roots)


def test_copies_are_one_step_wherever_they_lie_and_a_third_pack_hides_behind_both(tmp_path: Path) -> None:
    text = step_text("demo/x")
    registry = packs(tmp_path, one={"types": TYPES, "a": text, "copy": text}, two={"b": text})
    assert list(registry.steps) == ["demo/x"] and not registry.hidden_steps
    assert registry.warnings == () == registry.problems
    registry = packs(
        tmp_path / "again", one={"types": TYPES, "a": text}, two={"b": f"# 2\n{text}"}, three={"c": f"# 3\n{text}"}
    )
    assert list(registry.hidden_steps) == ["two:demo/x", "three:demo/x"] and len(registry.warnings) == 2
    assert registry.hidden_by(registry.step("demo/x")) == ("two:demo/x", "three:demo/x")
    assert registry.hidden_by(registry.step("two:demo/x")) == ()
    assert registry.find_step("two:demo/y") is None and registry.find_step("four:demo/x") is None
    with pytest.raises(UnknownNameError) as caught:
        registry.step("three:demo/y")
    assert "did you mean 'three:demo/x'?" in caught.value.hints


def test_an_alias_finds_the_one_step_that_has_it_where_nothing_else_goes_by_it(tmp_path: Path) -> None:
    def named(step_id: str, *aliases: str) -> str:
        return step_text(step_id).replace('category = "demo"', f"aliases = {[*aliases]}")

    one = {"types": TYPES, "a": named("demo/x", "x", "w", "p", "y"), "p": PIPELINE.format("p")}
    registry = packs(tmp_path, one=one, two={"b": named("demo/y", "y"), "c": named("w"), "d": named("demo/x", "z")})
    asked = ("x", "X", "w", "p", "z", "demo/x")
    assert [registry.step_id(name) for name in asked] == ["demo/x", "demo/x", "w", "p", "z", "demo/x"]
    assert registry.step("X").id == "demo/x" and registry.find_step("z") is None
    with pytest.raises(UnknownNameError, match="'y' is several steps") as caught:
        registry.step("y")
    assert caught.value.expected == "demo/x or demo/y"


def test_what_breaks_a_step_is_told_by_its_id_and_hides_no_other(tmp_path: Path) -> None:
    broken = "[step]\nid = 'demo/{}'\nunknown = 1\n"
    own = {"types": TYPES, "a": step_text("demo/x"), "b": broken.format("y")}
    registry = packs(tmp_path, one=own, two={"c": broken.format("x")})
    assert set(registry.broken) == {"demo/y", "one:demo/y", "two:demo/x"}
    with pytest.raises(ManifestError, match="unknown key"):
        registry.step("demo/y")


def test_a_pipeline_under_a_steps_name_goes_by_its_pack(tmp_path: Path) -> None:
    files = {"types": TYPES, "a": step_text("demo/x"), "p": PIPELINE.format("demo/x"), "q": PIPELINE.format("q")}
    registry = packs(tmp_path, one=files)
    assert list(registry.pipelines) == ["q"] and registry.pipeline("one:demo/x").name == "one:demo/x"
    assert registry.pipeline("q").name == "q" == registry.pipeline("one:q").name
    with pytest.raises(UnknownNameError) as caught:
        registry.pipeline("qq")
    assert caught.value.hints == ("did you mean 'q'?",)


@pytest.mark.parametrize(
    ("ports", "why"),
    [
        ('[[consumes]]\ntype = "top"\n[[produces]]\ntype = "b"\n', None),
        ('[[consumes]]\ntype = "a"\n[[produces]]\ntype = "a"\n[[produces]]\nname = "x"\ntype = "b"\n', None),
        ('[[consumes]]\ntype = "a"\nrequired = false\n[[produces]]\ntype = "b"\n', "does not make it of one 'a'"),
        ('[[consumes]]\ntype = "a"\n[[produces]]\ntype = "high"\n', "does not make it of one 'a'"),
    ],
)
def test_a_converter_takes_what_the_type_is_and_makes_what_it_becomes(
    ports: str, why: str | None, tmp_path: Path
) -> None:
    types = (
        "[a]\nis_a = ['top']\nconvert_to = { b = 'conv' }\n[b]\nis_a = ['high']\n[top]\n[high]\n[low]\nis_a = ['b']\n"
        "[under]\nis_a = ['a']\n"
    )
    registry = packs(tmp_path, one={"types": types, "conv": f'[step]\nid = "conv"\n{ports}'})
    assert [warning.what.partition("'conv' ")[2] for warning in registry.warnings] == ([why] if why else [])
    assert bool(registry.types.conversions("a")) == (why is None)
