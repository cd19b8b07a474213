"""`steps doctor`: what this machine has, what it lacks, and the command that fixes each. Exit code 1 if something
needed is missing."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from nemotron_steps.cli.errors import print_json
from nemotron_steps.cli.terminal import Terminal
from nemotron_steps.runs.log_format import readable_size as size
from nemotron_steps.runs.prerequisites import ABSENT, FAILED, NEEDS, OK, WARNING, Finding, look, package
from nemotron_steps.session.jobs import printable
from nemotron_steps.session.session import Session

if TYPE_CHECKING:
    import argparse

_LOW_DISK = 20_000_000_000
_TORCH_SECONDS = 120
_DIE_WITH_PARENT = "import ctypes, signal; ctypes.CDLL(None).prctl(1, signal.SIGKILL)"  # PR_SET_PDEATHSIG
_TORCH_PROBE = (
    "import torch; print(torch.__version__, torch.cuda.is_available(), torch.cuda.device_count(), "
    "torch.cuda.get_device_name(0) if torch.cuda.is_available() else '-', sep='|')"
)
_MARKS = {OK: ("✓", "green"), WARNING: ("▲", "yellow"), FAILED: ("✗", "red"), ABSENT: ("○", "dim")}


def doctor(args: argparse.Namespace) -> int:
    """`steps doctor`."""
    session = Session(args.home)
    out = Terminal.of()
    findings = []
    for title, found in {
        "software": _software(),
        "programs": _programs(),
        "home": _home(session),
        "packs": _packs(session),
    }.items():
        if not args.as_json:
            out.print(out.style(title, "dim"))
        for finding in found:
            findings.append(finding)
            if not args.as_json:
                mark = out.style(*_MARKS[finding.state])
                out.print(f"  {mark} {finding.name.ljust(16)} {out.style(printable(finding.detail), 'dim')}".rstrip())
                for line in finding.fix.splitlines():
                    out.print(f"    {' ' * 16} {out.style(line, 'cyan')}")
    failed = sum(finding.state == FAILED for finding in findings)
    if args.as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        warned = sum(finding.state == WARNING for finding in findings)
        text = f"{failed} to fix" if failed else "everything needed is here"
        text += f", {warned} warning{'s' if warned != 1 else ''}" if warned else ""
        out.print(f"\n{out.style(text, 'bold', 'red' if failed else 'green')}")
    return 1 if failed else 0


def _software() -> Iterator[Finding]:
    version = sys.version.split()[0]
    supported = sys.version_info >= (3, 11)
    yield Finding("python", OK if supported else FAILED, version, "" if supported else "install Python 3.11 or newer")
    yield _torch()
    for name, fix in (
        ("megatron-core", "pip install 'megatron-core>=0.16.1,<0.17'"),
        ("transformers", "pip install 'transformers>=5.16'"),
        ("hydra-core", "pip install 'hydra-core>=1.3.2,<1.4'"),
    ):
        yield package(name, fix, state=FAILED)
    yield look("ray")
    yield look("vllm")
    yield package("wandb", "pip install 'nemotron-steps[wandb]'  # [wandb] in env.toml")
    yield package("s3fs", "pip install 'nemotron-steps[s3]'     # --home s3://...")


def _torch() -> Finding:
    """What a process of its own says, which dies with this one: a driver can hang for ever."""
    fix = "pip install 'torch>=2.11,<2.14'"
    command = [sys.executable, "-c", f"{_DIE_WITH_PARENT}; {_TORCH_PROBE}"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_TORCH_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return Finding("torch", FAILED, f"does not load within {_TORCH_SECONDS} s", fix)
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines() or ["does not load"]
        return Finding("torch", FAILED, lines[-1], fix)
    version, has_cuda, count, name = result.stdout.strip().splitlines()[-1].split("|")
    if has_cuda == "True":
        return Finding("torch", OK, f"{version}, {count} × {name}")
    if shutil.which("nvidia-smi") is None:
        return Finding("torch", OK, f"{version}, CPU")
    detail = f"{version}, sees no GPU although there is a driver"
    return Finding("torch", WARNING, detail, "install a CUDA build of torch")


def _programs() -> Iterator[Finding]:
    from nemotron_steps.engine.kernels.compiler import INSTALL, build, find_compiler, kernel_folder
    from nemotron_steps.errors import UnsupportedError

    yield from (look(name) for name in NEEDS if name not in ("ray", "vllm", "torch"))
    command, name = find_compiler(), "C compiler"
    try:
        if command is None:
            yield Finding(name, ABSENT, "none: training and generation on CPU take longer", INSTALL)
        else:
            build(command, kernel_folder())
            yield Finding(name, OK, f"{shlex.join(command)}, kernels for CPU are compiled")
    except UnsupportedError as error:
        yield Finding(name, WARNING, f"{error.what}: {error.found}", "\n".join(error.hints))
    except OSError as error:
        detail = f"kernels for CPU are compiled anew at every start: {error}"
        yield Finding(name, WARNING, detail, "export XDG_CACHE_HOME=DIR")
    sbatch, fix = shutil.which("sbatch"), 'needed only for profiles with executor = "slurm"'
    yield Finding("slurm", ABSENT, "no sbatch", fix) if sbatch is None else Finding("slurm", OK, sbatch)


def _home(session: Session) -> Iterator[Finding]:
    from nemotron_steps.errors import StepsError

    try:
        backend = session.store.backend
        scratch = backend.scratch
        existing = next(folder for folder in (scratch, *scratch.parents) if folder.is_dir())
        with tempfile.TemporaryFile(dir=existing):
            pass
    except (OSError, StepsError) as error:
        yield Finding("home", FAILED, str(error).splitlines()[0], "--home DIR, or export STEPS_HOME=DIR")
        return
    yield Finding("home", OK, backend.url)
    free = shutil.disk_usage(existing).free
    fix = "" if free >= _LOW_DISK else "free some space, or put the home elsewhere: --home DIR"
    yield Finding("disk", WARNING if fix else OK, f"{size(free)} free", fix)


def _packs(session: Session) -> Iterator[Finding]:
    from nemotron_steps.manifest.packs import BUILT_IN, unusable_code

    registry = session.registry
    manifests = [*registry.steps.values(), *registry.hidden_steps.values()]
    for pack in registry.packs:
        count = sum(manifest.pack == pack.name for manifest in manifests)
        yield Finding(pack.name, OK, f"{count} step{'s' if count != 1 else ''}, {pack.origin}, {pack.base}")
    problems = [*registry.problems]
    for manifest in manifests:
        if manifest.pack != BUILT_IN:
            problems += unusable_code(manifest.id, manifest.step.model_dump(), manifest.where)
    for problem in problems:
        yield Finding("problem", FAILED, f"{problem.what} ({problem.where})", "\n".join(problem.hints))
    for warning in registry.warnings:
        yield Finding("note", WARNING, f"{warning.what} ({warning.where})", "\n".join(warning.hints))
    yield from _plugins()


def _plugins() -> Iterator[Finding]:
    from nemotron_steps.config.locations import environment_files
    from nemotron_steps.errors import StepsError
    from nemotron_steps.errors.plugins import entry_points, unusable
    from nemotron_steps.runs.executors.base import executor_names, profile_model

    for kind in ("environments", "executors"):
        for point in entry_points(f"nemotron_steps.{kind}"):
            if (why := unusable(point.value)) is not None:
                package = point.dist.name if point.dist is not None else "an unnamed package"
                detail = f"{point.name} of {package} cannot be loaded: {why[0]} ({point.value})"
                yield Finding(kind.rstrip("s"), FAILED, detail, f"pip uninstall {package}")
    yield Finding("executors", OK, ", ".join(executor_names()))
    if not any(file.is_file() for file in environment_files()):
        yield Finding("env.toml", ABSENT, "no profiles", "needed only for -r and -b")
        return
    from nemotron_steps.config.profiles import load_environment

    try:
        environment = load_environment()
        for name in environment.names:
            environment.profile(name, profile_model)
        names = ", ".join(environment.names) or "no profiles"
        yield Finding("env.toml", OK, ", ".join((names, *environment.mirrors.names)))
    except StepsError as error:
        first = next(iter(getattr(error, "problems", ())), error)
        yield Finding("env.toml", FAILED, f"{first.what} ({first.where})", "\n".join(first.hints))
