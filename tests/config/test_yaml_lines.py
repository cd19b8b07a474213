import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from nemotron_steps.config.hydra_loader import load_yaml
from nemotron_steps.errors import ConfigError

_NUMBERISH = st.text("0123456789+-._eE:xobinfaINF", min_size=1, max_size=8)
_WORDS = st.sampled_from(
    ["yes", "on", "off", "False", "NULL", "~", "2026-01-02", "1e-6", "1E5", ".5", "1_000", "0x1f", "0o7", "010", "="]
)


def _same(left, right) -> bool:
    if isinstance(left, float) and isinstance(right, float) and math.isnan(left):
        return math.isnan(right)
    return type(left) is type(right) and left == right


@settings(max_examples=150, deadline=None)
@given(_NUMBERISH | _WORDS)
@example("0x_")
def test_scalars_read_as_omegaconf_reads_them(tmp_path_factory, scalar):
    path = tmp_path_factory.mktemp("yaml") / "a.yaml"
    path.write_text(f"key: {scalar}\n")
    try:
        expected = OmegaConf.to_container(OmegaConf.load(path))
    except Exception:
        with pytest.raises(ConfigError):
            load_yaml(path)
        return
    assert _same(load_yaml(path)[0]["key"], expected["key"]), (scalar, expected)


def test_lines_of_nested_keys_lists_and_anchors(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("a: &base\n  b: 1\n  c:\n    - x\n    - y: 2\nd:\n  <<: *base\n  e: 3\n")
    data, lines, text = load_yaml(path)
    assert data["d"] == {"b": 1, "c": ["x", {"y": 2}], "e": 3}
    assert lines["a", "c", "1", "y"] == 5
    assert lines["d", "e"] == 8
    assert text.startswith("a: &base")


@pytest.mark.parametrize("content", [b"\xff\xfe", b"a: \x00\n", b"a: !!python/object:os.system x\n", b"a: !!int ''\n"])
def test_what_is_not_plain_yaml_is_refused(tmp_path, content):
    path = tmp_path / "a.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_yaml(path)
    assert str(path) in caught.value.where


def bomb(levels: int, width: int = 9) -> str:
    lines = ["l0: &l0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * width)}]" for n in range(1, levels)]
    return "\n".join(lines) + "\n"


def merge_bomb(levels: int) -> str:
    lines = ["m0: &m0 {a: 1, b: 2}"]
    lines += [f"m{n}: &m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 9)}]}}" for n in range(1, levels)]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (bomb(7), "too many values"),
        (merge_bomb(30), "too many values"),
        ("a: &a {b: {c: *a}}\n", "inside of itself"),
        ("a: " + "[" * 50_000, "nested too deeply"),
        ("".join(f"{' ' * n}a:\n" for n in range(400)), "nested too deeply"),
    ],
    ids=["aliases", "merges", "a circle", "brackets", "indentation"],
)
def test_a_file_that_stands_for_more_than_it_holds_is_refused(tmp_path, text, told):
    file = tmp_path / "bomb.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=told) as caught:
        load_yaml(file)
    assert (caught.value.where or "").startswith(str(file))


def test_an_empty_file_says_nothing_and_a_key_that_is_no_text_has_no_line(tmp_path):
    file = tmp_path / "a.yaml"
    for text in ("", "# only a remark\n"):
        file.write_text(text)
        assert load_yaml(file) == ({}, {}, text)
    file.write_text(f"a: {'[' * 99}{']' * 99}\n")  # as deep as may be
    load_yaml(file)
    file.write_text("? [1, 2]\n: 3\nb: 1\n")
    with pytest.raises(ConfigError):
        load_yaml(file)
