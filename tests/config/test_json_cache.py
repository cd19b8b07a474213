"""Files of the cache folder: what cannot be read or written is no reason to fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemotron_steps.config.locations import read_json, write_json


def test_a_file_that_cannot_be_put_in_its_place_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "taken" / "by").mkdir(parents=True)
    write_json(tmp_path / "taken", {"rows": []})
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
    write_json(tmp_path / "new" / "index.json", {"rows": []})
    assert [path.read_text() for path in (tmp_path / "new").iterdir()] == ['{"rows":[]}']
    assert read_json(tmp_path / "new" / "index.json") == {"rows": []}


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b'{"rows":', b"[" * 200_000, b"1" * 5000])
def test_what_is_no_json_counts_as_missing(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "index.json").write_bytes(content)
    assert read_json(tmp_path / "index.json") is None
    assert read_json(tmp_path / "missing.json") is None
