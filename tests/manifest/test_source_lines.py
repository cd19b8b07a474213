"""The line of a key is found in every way TOML lets one write it."""

from __future__ import annotations

import pytest

from nemotron_steps.manifest.source import SourceText

TEXT = '''# comment with [brackets] and key = value
[step]
id = "a/b"
description = """
[not.a.table]
consumes = 1
"""
tags = [
  "one",  # a ] in a comment
  "two]",
]
"quoted key" = 1

[[consumes]]
type = "first"
bind = { "data.path" = "x", plain = "y" }

[[consumes]]
type = "second"
[consumes.attributes]
tokenizer = 'lite[ral'

[ reference . sub ]
a.b = 1
[[stages]]
inputs = {
  policy = "sft",
}
'''


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (("step", "id"), 3),
        (("step", "tags"), 8),
        (("step", "missing"), 2),
        (("consumes", 0, "bind", "data.path"), 16),
        (("consumes", 1, "type"), 19),
        (("consumes", 1, "attributes"), 20),
        (("consumes", 1, "attributes", "tokenizer"), 21),
        (("reference", "sub", "a", "b"), 24),
        (("stages", 0, "inputs", "policy"), 27),
        ((), 1),
    ],
)
def test_line_of_key(path: tuple[str | int, ...], line: int) -> None:
    assert SourceText(TEXT).line(path) == line
