"""Entry points are those that the standard library finds, without its cost where there are none."""

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from nemotron_steps.errors.plugins import entry_points

GROUP = "some_tool.plugins"


def _distribution(folder: Path, info: str = "plugin-1.0.dist-info") -> None:
    (folder / info).mkdir(parents=True)
    (folder / info / "METADATA").write_text("Name: plugin\nVersion: 1.0\n")
    (folder / info / "entry_points.txt").write_text(f"[{GROUP}]\nfirst = plugin:First\n[others]\nx = y:z\n")


def _found() -> list[tuple[str, str]]:
    found = [(point.name, point.value) for point in entry_points(GROUP)]
    assert found == [(point.name, point.value) for point in metadata.entry_points(group=GROUP)]
    return found


@pytest.mark.parametrize("info", ["plugin-1.0.dist-info", "Plugin.egg-info"])
def test_what_a_folder_on_the_path_announces(info: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _found() == []
    _distribution(tmp_path, info)
    monkeypatch.syspath_prepend(tmp_path)
    assert _found() == [("first", "plugin:First")]


def test_metadata_is_not_even_imported_where_nothing_is_announced(tmp_path: Path) -> None:
    code = (
        "import json, sys; from nemotron_steps.errors.plugins import entry_points;"
        f"found = entry_points({GROUP!r}); print(json.dumps([len(found), 'importlib.metadata' in sys.modules]))"
    )
    answer = subprocess.run(
        [sys.executable, "-S", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert json.loads(answer.stdout) == [0, False]
