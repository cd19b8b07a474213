"""What every executor is, what it is given, and how one is found by name."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from nemotron_steps.config.names import meant
from nemotron_steps.config.profiles import OpenProfile, Profile
from nemotron_steps.config.secrets import mask
from nemotron_steps.errors import RequestError, UnsupportedError, did_you_mean
from nemotron_steps.errors.plugins import entry_points, load_object

ENTRY_POINT_GROUP = "nemotron_steps.executors"
_BUILT_IN = {
    "docker": "docker:DockerExecutor",
    "lepton": "lepton:LeptonExecutor",
    "local": "detached:DetachedExecutor",
    "ray": "ray_jobs:RayExecutor",
    "slurm": "slurm:SlurmExecutor",
}
_IN_EXAMPLES = frozenset({"dgxcloud", "skypilot"})
"""Executors that examples/cloud_executors brings."""
_RAY_PORT = 26379
"""Not Ray's usual one, where a cloud's scheduler may have a Ray of its own."""


class JobState(StrEnum):
    """Where a job stands."""

    PENDING = "pending"
    """Queued, not started."""
    RUNNING = "running"
    """Started and not over."""
    DONE = "done"
    """Ended with exit code 0."""
    FAILED = "failed"
    """Ended with another exit code."""
    CANCELLED = "cancelled"
    """Stopped by somebody."""
    TIMED_OUT = "timed out"
    """Reached its time limit: the same command goes on from the last checkpoint."""
    OUT_OF_MEMORY = "out of memory"
    """Killed for using more memory than it asked for."""
    LOST = "lost"
    """Its node died, it was preempted, or nobody knows it any more."""

    @property
    def over(self) -> bool:
        """Whether nothing more will happen."""
        return self not in (JobState.PENDING, JobState.RUNNING)


@dataclass(frozen=True)
class JobStatus:
    """A job's state, with what its executor says about it: a reason, an exit code."""

    state: JobState
    detail: str = ""


@dataclass(frozen=True)
class Launch:
    """One run to start.

    Attributes:
        run_id: its folder exists, in state `submitted`.
        folder: that folder, as seen from here and from where the run will work.
        arguments: the words after `steps run`: `--resume RUN --home HOME`.
        profile: where to run, as the executor's own model of a profile.
        working_dir: the directory the command is run in.
        environment: variables to set beside the profile's.
        paths: files and folders of this machine that the run reads, beside its home.
        attached: somebody waits for the run (`-r`), rather than not (`-b`).
        force_squash: rebuild the container image file.
    """

    run_id: str
    folder: Path
    arguments: tuple[str, ...]
    profile: Profile
    working_dir: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    paths: tuple[Path, ...] = ()
    attached: bool = False
    force_squash: bool = False

    @property
    def home(self) -> Path:
        """The home that the run's folder is in."""
        return self.folder.parent.parent

    @property
    def variables(self) -> dict[str, str]:
        """Variables of the job: the profile's and `environment`."""
        return {**self.profile.env_vars, **self.environment}

    @property
    def secret_variables(self) -> list[str]:
        """Names of those variables whose values are secrets, sorted."""
        return sorted(name for name, value in self.variables.items() if mask(name, value) != value)

    def refuse_secrets(self, shown_by: str, *hints: str) -> None:
        """RequestError if a variable is a secret, for schedulers that show a job's variables."""
        if self.secret_variables:
            found = ", ".join(self.secret_variables)
            what = f"{shown_by} shows the variables of a job, and these are secrets"
            raise RequestError(what, where="env_vars", found=found, hints=hints)

    def unseen(self, mounts: Iterable[str]) -> list[Path]:
        """What of `paths`, and of what they link to, a container with these HOST:CONTAINER pairs lacks at its path."""
        places = [mount.split(":") for mount in mounts]
        found = [self.home, self.working_dir, *(Path(place[0]) for place in places if place[:1] == place[1:2])]
        known = len(found)
        for path in (each for named in self.paths for each in (named, named.resolve())):
            # A snapshot of the hub's cache is links into the folder of its model.
            whole = next((parent for parent in path.parents if parent.name.startswith("models--")), path)
            if not any(whole.is_relative_to(folder) for folder in found):
                found.append(whole)
        return found[known:]

    def command(self, *, in_container: bool = False) -> list[str]:
        """The whole command: this Python for a plain process, the image's own `steps` in a container."""
        if in_container:
            return ["steps", "run", *self.arguments]
        return [sys.executable, "-m", "nemotron_steps.cli.main", "run", *self.arguments]

    def has_program(self) -> str:
        """A shell line that ends a job in whose container there is nothing to run."""
        program, image = self.command(in_container=True)[0], getattr(self.profile, "container_image", None)
        built = f"docker build -f containers/Dockerfile.cuda --build-arg BASE={image} --build-arg PYTHON=python3.12"
        added = f"Add it: {built} -t IMAGE --push . and name IMAGE in container_image"
        message = f"error: image {image} has no `{program}`. {added}"
        return f"command -v {shlex.quote(program)} > /dev/null || {{ echo {shlex.quote(message)} >&2; exit 2; }}"

    def node_script(self, *, head: str, rank: str) -> str:
        """A shell script for a job whose every node runs the same container: the run on the first, Ray over all.

        It works in `working_dir` if the node sees that. The other nodes end with the first one.

        Args:
            head: shell word for the first node's address.
            rank: shell word for a node's number, from 0.
        """
        folder, run = shlex.quote(str(self.working_dir)), f"exec {shlex.join(self.command(in_container=True))}"
        enter = f"[ ! -d {folder} ] || cd {folder}\n{self.has_program()}"
        if self.profile.nodes == 1:
            return f"{enter}\n{run}"
        ray = "env -u RAY_ADDRESS ray start --disable-usage-stats"
        return f"""{enter}
head={head}
export RAY_ADDRESS="$head:{_RAY_PORT}"
if [ "{rank}" -eq 0 ]; then
    {ray} --head --port={_RAY_PORT} --include-dashboard=false
    {run}
fi
until (exec 3<>/dev/tcp/$head/{_RAY_PORT}) 2>/dev/null; do sleep 1; done
{ray} --address="$RAY_ADDRESS"
while (exec 3<>/dev/tcp/$head/{_RAY_PORT}) 2>/dev/null; do sleep 5; done"""


class Executor(Protocol):
    """Starts jobs and answers for them. A job is named by the string `submit` returns.

    One whose jobs write the run's folder where this machine cannot see it has a further method, `fetch(job, folder)`,
    that brings here what is there; `check(launch)` refuses before anything is submitted, also in a dry run, what
    `submit` would. An attribute `profile_model` may name the model of its profiles; without one any
    key is passed on (OpenProfile).
    """

    def submit(self, launch: Launch) -> str:
        """Start a run and return its job's name. UnsupportedError if this machine cannot; RequestError if the
        profile asks for what there is not."""

    def status(self, job: str) -> JobStatus:
        """Where a job stands."""

    def cancel(self, job: str) -> None:
        """Ask a job to stop: it gets SIGTERM, saves what it has, and ends. Nothing happens if it is over."""


def find_executor(name: str) -> Executor:
    """The executor a profile names. UnsupportedError if nothing here provides it, or what provides it is not one."""
    if name in _BUILT_IN:
        executor: Executor = load_object(f"{__package__}.{_BUILT_IN[name]}")()
        return executor
    # An entry point seen twice on the path is one; two different ones are for the user to choose between.
    points = {point.value: point for point in entry_points(group=ENTRY_POINT_GROUP) if point.name == name}
    if not points:
        names = executor_names()
        package = f"PACKAGE   # one whose entry points of the group {ENTRY_POINT_GROUP} have '{name}'"
        if name in _IN_EXAMPLES:
            package = "./examples/cloud_executors   # in a checkout of nemotron-steps"
        raise UnsupportedError(
            f"no executor '{name}' is installed",
            expected=" or ".join(names),
            found=name,
            hints=did_you_mean(meant(name, names)) or (f"pip install {package}", "steps doctor"),
        )
    packages = [each.dist.name if each.dist is not None else "an unnamed package" for each in points.values()]
    if len(points) > 1:
        what = f"several installed packages provide an executor '{name}'"
        raise UnsupportedError(what, found=" and ".join(packages), hints=[f"pip uninstall {each}" for each in packages])
    (point,), (package,) = points.values(), packages
    where = f"entry point '{name}' of {package}: {point.value}"
    try:
        with redirect_stdout(sys.stderr):
            provided: Executor = load_object(point.value)()
    except Exception as error:
        what = f"executor '{name}' cannot be loaded: {type(error).__name__}: {error}"
        raise UnsupportedError(what, where=where) from error
    missing = [method for method in ("submit", "status", "cancel") if not callable(getattr(provided, method, None))]
    if missing:
        what = f"executor '{name}' is not an executor: it lacks {', '.join(missing)}"
        raise UnsupportedError(what, where=where)
    model = getattr(provided, "profile_model", OpenProfile)
    if not (isinstance(model, type) and issubclass(model, Profile)):
        what, expected = f"executor '{name}' has a profile_model that is not a Profile", f"a subclass of {Profile!r}"
        raise UnsupportedError(what, where=where, expected=expected, found=repr(model))
    return provided


def executor_names() -> tuple[str, ...]:
    """What `executor = ` may say here, sorted: the built-in ones, and those that installed packages announce."""
    return tuple(sorted({*_BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))}))


def profile_model(executor: str) -> type[Profile]:
    """The model of an executor's profiles. UnsupportedError as `find_executor`."""
    model: type[Profile] = getattr(find_executor(executor), "profile_model", OpenProfile)
    return model
