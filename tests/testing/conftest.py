import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.testing.toy_packages import write_package


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Writes a package and has it installed for this test alone."""
    before = set(sys.modules)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("STEPS_PATH", raising=False)
    monkeypatch.chdir(tmp_path)

    def write(*arguments, **options) -> Path:
        root = write_package(tmp_path / "site", *arguments, **options)
        monkeypatch.syspath_prepend(str(root))
        return root

    yield write
    for name in set(sys.modules) - before:
        if name.partition(".")[0].startswith(("toykit", "jax")):
            del sys.modules[name]
    importlib.invalidate_caches()
