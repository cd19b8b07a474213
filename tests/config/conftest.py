from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from nemotron_steps.config.compose import SearchPath

STEP = "rl/toy"


@pytest.fixture
def configs(tmp_path: Path) -> Callable[[Mapping[str, str]], SearchPath]:
    """Write config files (path below `configs/` → text) and return the search path of step `rl/toy`."""

    def write(files: Mapping[str, str]) -> SearchPath:
        root = tmp_path / "pack" / "configs"
        for name, text in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return SearchPath(STEP, (root,))

    return write
