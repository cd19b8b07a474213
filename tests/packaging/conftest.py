"""A clean environment with the built wheel in it, away from the checkout."""

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a clean environment's scripts. Only dependencies come from the environment that runs the tests."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(ROOT)], check=True, capture_output=True
    )
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", str(wheel)], check=True, capture_output=True)
    paths = {"base": str(folder / "venv"), "platbase": str(folder / "venv")}
    site = Path(sysconfig.get_path("purelib", vars=paths))
    # A path line brings the libraries in, but not the editable install of this checkout: its own .pth is not read.
    libraries = [entry for entry in sys.path if Path(entry).name == "site-packages"]
    (site / "dependencies.pth").write_text("".join(f"{entry}\n" for entry in libraries))
    return folder / "venv" / "bin"


@pytest.fixture
def steps(commands: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `steps` of the clean environment in an empty folder."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "STEPS"))}
        command = [str(commands / "steps"), *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)

    return run
