"""What every test shares: one torch thread, a home of its own, and what to do where a program is missing.

A test marked with a name of NEEDS needs something a plain Python environment may lack. On a developer's machine it is
skipped with the command that installs it. With CI set that is a failure, and so is any other skipped test, but for what
needs CUDA and what this host's kernel or processor lacks, which no command installs.

GPUs are hidden from tests unless --cuda is given: those marked cuda need it.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import re
import shutil
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from nemotron_steps.engine.kernels import bound_spinning

if TYPE_CHECKING:
    from tests.containers.engines import Engines

# How long an example takes says more about the machine than about the code.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

NEEDS = {
    "vllm": (lambda: importlib.util.find_spec("vllm") is not None, "make setup-test"),
    "ray": (lambda: importlib.util.find_spec("ray") is not None, "make setup-test"),
    "slurm": (
        lambda: all(map(shutil.which, ("slurmctld", "slurmd", "munged", "sbatch"))),
        "scripts/install_system.sh",
    ),
    "containers": (
        lambda: os.geteuid() == 0 and all(map(shutil.which, ("docker", "dockerd", "podman", "git"))),
        "scripts/install_system.sh, as root",
    ),
    "sandbox": (lambda: shutil.which("bwrap") is not None, "scripts/install_system.sh"),
    "compiler": (lambda: shutil.which("gcc") is not None, "scripts/install_system.sh"),
    "browser": (lambda: any(map(shutil.which, ("chromium", "google-chrome"))), "scripts/install_system.sh"),
    "mkdocs": (lambda: importlib.util.find_spec("mkdocs") is not None, "make setup-test"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cuda", action="store_true", help="let the tests see the GPUs; most are written for the CPU")


def pytest_configure(config: pytest.Config) -> None:
    gc.set_threshold(50_000, 10, 10)  # collections find next to nothing, for up to a fifth of the time
    if not config.getoption("--cuda"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Two workers of a parallel run with two threads each would fight over two cores; one is deterministic, too.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    bound_spinning()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("WANDB_MODE", "offline")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m slurm` and `-m vllm` import the files that name the mark, not all of them, which takes half a minute."""
    mark = config.option.markexpr
    if mark not in ("slurm", "vllm") or not re.fullmatch(r"test_\w+\.py", collection_path.name):
        return None
    return True if f"mark.{mark}" not in collection_path.read_text() else None


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()  # modules, and the tests themselves, are not gone through again at every collection


def pytest_unconfigure(config: pytest.Config) -> None:
    gc.unfreeze()  # libraries complain about objects that outlive the interpreter


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--cuda"):
        for item in items:
            if item.get_closest_marker("cuda") is not None:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device: make test-cuda"))
    if hasattr(config, "workerinput"):  # of several processes: what takes minutes first, so that none is left with it
        items.sort(key=lambda item: item.get_closest_marker("chain") is None)
    missing = {name: command for name, (present, command) in NEEDS.items() if not present()}
    for item in items:
        for name, command in missing.items():
            if item.get_closest_marker(name) is None:
                continue
            if os.environ.get("CI"):
                item.add_marker(pytest.mark.usefixtures("_missing_program"))
                item.user_properties.append(("missing", f"{name}: run {command}"))
            else:
                item.add_marker(pytest.mark.skip(reason=f"{name} is not installed: {command}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    # The kit's own suites skip checks that the subject gives no ground for.
    if item.get_closest_marker("cuda") is None and "examination" not in getattr(item, "fixturenames", ()):
        _refuse_to_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _refuse_to_skip(report)
    return report


def _refuse_to_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if not (os.environ.get("CI") and report.skipped) or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if not reason.removeprefix("Skipped: ").startswith(("this host", "needs CUDA")):
        report.outcome = "failed"
        report.longrepr = f"CI must run this test, which is skipped: {reason}"


@pytest.fixture
def _missing_program(request: pytest.FixtureRequest) -> None:
    reasons = [value for key, value in request.node.user_properties if key == "missing"]
    pytest.fail(f"CI must run this test, and something is not installed: {'; '.join(reasons)}")


@pytest.fixture(autouse=True)
def _home_of_its_own(tmp_path, tmp_path_factory, pytestconfig, monkeypatch):
    """No test reads or writes the user's home folder, profiles or packs."""
    monkeypatch.setenv("STEPS_HOME", str(tmp_path / "steps-home"))
    monkeypatch.setenv(
        "XDG_CACHE_HOME",
        os.environ.get("STEPS_TEST_CACHE") or str(_cache_with_kernels(tmp_path_factory, pytestconfig)),
    )
    monkeypatch.delenv("STEPS_PATH", raising=False)


def _cache_with_kernels(tmp_path_factory: pytest.TempPathFactory, config: pytest.Config) -> Path:
    """A cache with nothing in it but the kernels in C, which take seconds to compile."""
    caches = tmp_path_factory.mktemp("caches")
    kernels = config.rootpath / ".pytest_cache" / "kernels"
    kernels.mkdir(parents=True, exist_ok=True, mode=0o700)
    (caches / "nemotron_steps").mkdir()
    (caches / "nemotron_steps" / "kernels").symlink_to(kernels)
    return caches


@pytest.fixture(params=[("x86-64", "sse2"), ("haswell", "avx2"), ("skylake-avx512", "avx512vl")], ids=lambda p: p[0])
def kernels_for(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The kernels in C are compiled for vectors of 4, 8 and 16."""
    from nemotron_steps.engine.kernels import compiler

    machine, needs = request.param
    if needs not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip(f"this host's processor has no {needs}")
    flags = tuple(f"-march={machine}" if flag.startswith("-march") else flag for flag in compiler._FLAGS)
    assert flags != compiler._FLAGS
    monkeypatch.setattr(compiler, "_FLAGS", flags)
    compiler.library.cache_clear()
    yield machine
    compiler.library.cache_clear()


@pytest.fixture(scope="session")
def container_engines() -> Iterator[Engines]:
    """Docker and Podman, and an image with a small repository that has a fault."""
    from tests.containers import engines
    from tests.environments.swe.tasks import CALC

    with ExitStack() as stack:
        try:
            started = stack.enter_context(engines.started({"pkg/__init__.py": "", "pkg/calc.py": CALC}))
        except engines.NoEngineError as error:
            if os.environ.get("CI"):
                raise
            pytest.skip(str(error))
        yield started


@pytest.fixture(params=["docker", "podman"])
def real_engine(request: pytest.FixtureRequest, container_engines: Engines, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of one of them; what the test runs finds its store."""
    for name, value in container_engines.environment.items():
        monkeypatch.setenv(name, value)
    return str(request.param)
