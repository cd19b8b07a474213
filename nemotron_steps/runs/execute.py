"""Run a plan: step by step, each cached, continued or executed, its outputs committed, everything journalled.

The order in which things become durable is what makes a kill harmless: outputs are filled in the work folder, then
marked as filled, then committed one by one, then remembered under the cache key; only then is the work folder
removed. Whatever was not reached is done by the next run of the same command.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from traceback import format_exception
from typing import TYPE_CHECKING, Any

from nemotron_steps import __version__
from nemotron_steps.artifacts.files import (
    as_storage_error,
    plain,
    remove_tree,
    storage_errors,
    to_json_bytes,
    write_atomic,
)
from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.artifacts.validators import declare
from nemotron_steps.config.locations import of_launcher, variables_set
from nemotron_steps.errors import InterruptedRunError, RetryableError, StepFailedError, StepsError, StorageError
from nemotron_steps.manifest.typegraph import TypeGraph
from nemotron_steps.resolver.plan import Instance, Plan, PlannedStep, StepOutput
from nemotron_steps.runs import hints as advice
from nemotron_steps.runs.cache import KEY, CacheEntry, changes_since, recall, remember
from nemotron_steps.runs.cache_key import depends_on, key_of, recorded
from nemotron_steps.runs.context import Listener, OutputSlot, StepContext
from nemotron_steps.runs.locks import hold, hold_if_free, read_holder
from nemotron_steps.runs.log_format import main_metric
from nemotron_steps.runs.recorder import Recorder, kept, unwritable_is_told
from nemotron_steps.runs.report.seed_stats import Outcome, Table, spread_tables
from nemotron_steps.runs.run_folder import (
    DONE,
    FAILED,
    INTERRUPTED,
    JOB_FILE,
    RUNNING,
    RunFolder,
    get_run,
    new_run_id,
    read_events,
    refuse_busy,
    this_process,
)
from nemotron_steps.runs.step_workdir import (
    WorkFolder,
    as_steps_error,
    check_inputs,
    imported,
    name_users_files,
    open_input,
    stage_outputs,
    validated_config,
)
from nemotron_steps.runs.trackers.base import ExperimentTracker, trackers
from nemotron_steps.stopping import deferred, interruptible, stop_if_asked, was_interrupted

if TYPE_CHECKING:
    from nemotron_steps.config.profiles import MirrorSettings


_LOG = logging.getLogger(__name__)
_STOPS_ALL = (RetryableError, StorageError, InterruptedRunError)
"""What the other instances of a fan-out would run into as well."""


@dataclass(frozen=True)
class StepResult:
    """How one step of a run went: it "ran", is "cached", or "reused" what another run made while this one waited."""

    key: str
    step_id: str
    state: str
    outputs: Mapping[str, Artifact]
    seconds: float
    summary: Mapping[str, Any] = field(default_factory=dict)
    hints: tuple[advice.Hint, ...] = ()
    instance: Instance | None = None
    made_by: str = ""
    """The run that made it, and the key of the cache that it made it under."""
    cache_key: str = ""


@dataclass(frozen=True)
class RunResult:
    """A finished run. `folder` is its run folder on this machine."""

    id: str
    folder: Path
    steps: tuple[StepResult, ...]
    seconds: float

    @property
    def spreads(self) -> dict[str, Table]:
        """What instances of fanned-out stages came to, by title; see `spread`."""
        return spread_tables(
            Outcome(s.key, s.summary, s.instance.stage if s.instance else "", s.instance.labels if s.instance else None)
            for s in self.steps
        )

    @property
    def nothing_ran(self) -> bool:
        """Whether every step was cached."""
        return all(step.state != "ran" for step in self.steps)

    def step(self, key: str) -> StepResult:
        """The result of one step of the plan. KeyError if there is none."""
        for each in self.steps:
            if each.key == key:
                return each
        raise KeyError(key)


def execute(
    plan: Plan,
    store: ArtifactStore,
    *,
    types: TypeGraph | None = None,
    force: bool = False,
    resume: str | None = None,
    listeners: Sequence[Listener] = (),
    request: Mapping[str, Any] | None = None,
    mirrored: MirrorSettings | None = None,
    ends_process: bool = True,
    takes_over: bool = False,
) -> RunResult:
    """Run every step of a plan that is not already done. Raises what the first step failed with, after journalling it.

    Args:
        types: the type graph the plan was resolved with, for supertypes of what is committed and consumed.
        force: run the plan's goals from the start even if they are cached. A run that is resumed without it goes on
            with those that it was forced to make and has not made.
        resume: id of an earlier (or submitted) run: its folder is continued instead of a new one begun.
        request: what was asked, kept redacted in run.json; `resume` by id alone needs it.
        ends_process: whether a second Ctrl-C does; else it is another KeyboardInterrupt (`interruptible`).
        takes_over: this process is not an executor's job, and one that the run had before has no more to do with it.
    """
    declare((types or TypeGraph()).validators)
    folder = RunFolder(store, get_run(store, resume).id if resume else new_run_id(plan.name or plan.goals[-1]))
    inherited = of_launcher()
    info = folder.load() or folder.create(plan.name, {})
    with (
        storage_errors(folder.path),
        interruptible(ends_process) as interrupt,
        variables_set(inherited),
        hold(folder.lock, {"run": folder.id}, lambda holder: refuse_busy(folder.id, holder)),
    ):
        started = time.monotonic()
        secrets = [planned.config for planned in plan.steps] + [list(planned.overrides) for planned in plan.steps]
        recorder = Recorder(folder, info, [*secrets, plain(request or {})])
        recorder.listeners += listeners
        open_trackers: list[ExperimentTracker] = []
        run = _Run(plan, store, types or TypeGraph(), force, recorder, started)
        with recorder.capture_logging():
            try:
                # Slurm sets PMI's for what it starts itself, our jobs among it.
                if ignored := ", ".join(name for name in sorted(inherited) if not name.startswith("PMI")):
                    _LOG.warning("ignored, for a run makes its own ranks: %s, as another launcher set them", ignored)
                if takes_over:
                    (folder.path / JOB_FILE).unlink(missing_ok=True)  # nobody asks about it, or cancels it
                    recorder.info = folder.update(recorder.info, executor="local", job="")
                run.begin(resumed=info.attempts > 0, request=request or info.request)
                for tracker in trackers(mirrored, folder, plan, store, recorder.redact) if mirrored else ():
                    open_trackers.append(tracker)
                    recorder.listeners.append(tracker)
                run.steps()
            except BaseException as error:
                with deferred():
                    ended = run.end_badly(error, interrupt.get("signal"))
                if ended is error:
                    raise
                raise ended from error
            else:
                with deferred():
                    run.end(DONE)
            finally:
                with deferred():
                    for tracker in open_trackers:
                        tracker.close()
                    recorder.close()
                    run.publish()
        return RunResult(folder.id, folder.path, tuple(run.results), time.monotonic() - started)


@dataclass
class _Run:
    """One execution of a plan: what is known so far, and the handling of one step."""

    plan: Plan
    store: ArtifactStore
    types: TypeGraph
    force: bool
    recorder: Recorder
    started: float
    outputs: dict[str, Mapping[str, Artifact]] = field(default_factory=dict)
    results: list[StepResult] = field(default_factory=list)

    def begin(self, *, resumed: bool, request: Mapping[str, Any]) -> None:
        """Journal the start: plan.json, config.yaml, run.json, run_started."""
        import yaml

        recorder = self.recorder
        if self.force:  # first of all: whatever ends the run from here on, it is resumed with it
            recorder.set_status(recorder.info.status, forced=dict.fromkeys(self.plan.goals, ""))
        folder = recorder.folder.path
        as_dict = recorder.redact(plain(self.plan.to_dict()))
        for step in as_dict["steps"]:
            step["overrides"] = [recorder.redact_text(text) for text in step["overrides"]]
        write_atomic(folder / "plan.json", to_json_bytes(as_dict))
        configs = {planned.key: recorder.redact(plain(dict(planned.config))) for planned in self.plan.steps}
        config_yaml = yaml.safe_dump(configs, sort_keys=False, allow_unicode=True, width=120)
        write_atomic(folder / "config.yaml", config_yaml.encode())
        pending = {planned.key: {"state": "pending"} for planned in self.plan.steps}
        attempt, name = recorder.info.attempts + 1, self.plan.name
        says = {"name": name, "request": plain(request), "steps": pending, "attempts": attempt, "error": None}
        recorder.set_status(RUNNING, **says, **this_process())
        steps, run_id = as_dict["steps"], recorder.folder.id
        recorder.run.record("run_started", run=run_id, name=name, resumed=resumed, steps=steps, attempt=attempt)

    def steps(self) -> None:
        """Do every step in order. An instance of a fan-out that fails takes along only what reads it."""
        lost: set[str] = set()
        failures: list[StepsError] = []
        for planned in self.plan.steps:
            if any(isinstance(s, StepOutput) and s.step_key in lost for s in planned.inputs.values()):
                lost.add(planned.key)
                continue
            try:
                self.step(planned)
            except StepsError as error:
                if planned.instance is None or isinstance(error, _STOPS_ALL):
                    raise
                lost.add(planned.key)
                failures.append(error)
        if failures:
            raise failures[0]

    def step(self, planned: PlannedStep) -> None:
        """Do one step: reuse, continue or execute it."""
        try:
            with ExitStack() as ending:
                stop_if_asked()
                entry, state, outputs = self._do(planned, ending)
                signals = self.recorder.signals[planned.key].values() if state == "ran" else ()
                hints = advice.hints_for_signals(signals, planned.manifest, planned.config)
                made = entry.seconds, entry.summary, tuple(hints), planned.instance, entry.run, entry.key
                self.results.append(StepResult(planned.key, planned.step_id, state, outputs, *made))
                self.outputs[planned.key] = outputs
                refs = {port: artifact.ref for port, artifact in outputs.items()}
                # A cached step too says its key: by it the metrics are found of a run that is resumed.
                told = {"outputs": refs, "seconds": entry.seconds, "metric": main_metric(entry.summary)}
                self.recorder.set_step(planned.key, state, cache_key=entry.key, **told)
        except StepsError as error:
            with deferred():
                self._journal_failure(planned, error)
            raise
        except KeyboardInterrupt:
            self.recorder.set_step(planned.key, INTERRUPTED)
            raise
        self._journal_hints(planned, hints, failure=False)
        if state == "ran":
            self.publish()
        key = next((a.producer.made_under for a in outputs.values() if a.producer), entry.key)
        failed = advice.failed_checks(planned.checks, entry.summary, self.store, entry.run, key)
        for each in failed:
            self.recorder.tracker(planned.key).record("warning", text=f"check of {planned.key} failed: {each}")
        if blocking := [each for each in failed if each.check.severity == "block"]:
            raise advice.blocked(blocking, planned, self.recorder.folder.id)

    def _inputs(self, planned: PlannedStep) -> dict[str, Artifact]:
        """What each port reads, opened and checked."""
        inputs: dict[str, Artifact] = {}
        for port, source in planned.inputs.items():
            if isinstance(source, StepOutput):
                inputs[port] = self.store.open(self.outputs[source.step_key][source.port])
            elif (artifact := open_input(planned, port, source, self.store, types=self.types)) is not None:
                inputs[port] = artifact
        check_inputs(planned, inputs, self.types)
        return inputs

    def _do(self, planned: PlannedStep, ending: ExitStack) -> tuple[CacheEntry, str, Mapping[str, Artifact]]:
        """Take what is cached under the step's key; else make it, or commit what a killed attempt had filled."""
        inputs = self._inputs(planned)
        depends = depends_on(planned, inputs)
        key = key_of(depends)
        tracker = self.recorder.tracker(planned.key)
        forced = self.recorder.info.forced.get(planned.key)
        work = WorkFolder(self.store.backend.local("work"), key)
        if forced is None:
            entry = recall(self.store, key)
            if entry is not None:
                work.remove_if_abandoned()
                return entry, "cached", self._reuse(planned, entry, "cached")
        holder = {"run": self.recorder.folder.id, "step": planned.key}
        earlier = read_holder(work.lock)
        with hold(work.lock, holder, lambda other: tracker.record("step_waiting", holder=other)) as waited:
            entry = recall(self.store, key) if waited or forced is None else None
            if entry is not None:
                self._not_forced_any_more(planned)
                return entry, "reused", self._reuse(planned, entry, "reuses what the other run made")
            if forced not in (None, key):  # else what is there is this step's own, of an attempt that was killed
                work.remove()
                self.recorder.set_status(RUNNING, forced={**self.recorder.info.forced, planned.key: key})
            config = validated_config(planned, inputs)
            made_of = recorded(depends, planned)
            if forced is None and not work.has_progress():
                self._take_over_own_attempt(planned, work, made_of)
            resumed = work.has_progress()
            work.note_depends(made_of)
            if resumed and earlier.get("run") != self.recorder.folder.id:
                self.recorder.carry_over(self.store, earlier, planned.key)
            tracker.record("step_started", cache_key=key, work=str(work.path), resumed=resumed)
            self.recorder.set_step(planned.key, RUNNING, cache_key=key)
            filled = work.filled(planned.produces)
            if filled is not None:
                tracker.summary(filled[1])  # of an attempt that was killed before it had committed
            else:
                filled = self._call(planned, config, inputs, work)
            run_id = self.recorder.folder.id
            staged = stage_outputs(planned, filled[0], work, self.store, self.types, inputs, run_id, key)
            # From the first that is moved away until that is on record a stop would have the step made once more.
            ending.enter_context(deferred())
            outputs: dict[str, Artifact] = {}
            for port, artifact in staged.items():
                with storage_errors(artifact.path):
                    outputs[port] = self.store.publish(artifact)
            entry = CacheEntry(key, run_id, filled[2], outputs, filled[1], __version__, made_of)
            remember(self.store, entry)
            # Before the folder goes: a kill in between must not have the step made once more.
            self._not_forced_any_more(planned)
            work.remove()
        refs = {port: artifact.ref for port, artifact in outputs.items()}
        tracker.record("step_finished", outputs=refs, seconds=entry.seconds)
        return entry, "ran", outputs

    def _take_over_own_attempt(self, planned: PlannedStep, work: WorkFolder, depends: Mapping[str, str]) -> None:
        """Go on from this run's last attempt under another key, where nothing but code has changed since: whoever
        resumes a run after an upgrade means its checkpoints."""
        own = [each for each in read_events(self.store, self.recorder.folder.id) if each.get("step") == planned.key]
        for key in reversed([each["cache_key"] for each in own if each["kind"] == "step_started"]):
            earlier = WorkFolder(work.root, key)
            if not KEY.fullmatch(key) or key == work.key or not earlier.has_progress():
                continue
            with hold_if_free(earlier.lock) as free:
                before = earlier.noted_depends() if free else None
                changes = None if before is None else changes_since(planned, before, depends)
                if not free or (changes is not None and not changes.code):
                    return
                remove_tree(work.path)
                earlier.path.rename(work.path)
            what = "what it depends on may have" if changes is None else ", ".join(changes.differences)
            _LOG.warning("%s goes on from its checkpoints; changed since: %s; --force starts anew", planned.key, what)
            return

    def _not_forced_any_more(self, planned: PlannedStep) -> None:
        forced = self.recorder.info.forced
        if planned.key in forced:
            left = {key: began for key, began in forced.items() if key != planned.key}
            self.recorder.set_status(RUNNING, forced=left)

    def _reuse(self, planned: PlannedStep, entry: CacheEntry, reason: str) -> Mapping[str, Artifact]:
        outputs = dict(entry.outputs)
        if planned.key in self.plan.goals and self.store.backend.scratch == Path(self.store.backend.url):
            outputs = {port: self.store.open(artifact) for port, artifact in outputs.items()}
        accepted = {f"accepted {a.producer.acceptance}" for a in outputs.values() if a.producer and a.producer.accepted}
        refs = {port: artifact.ref for port, artifact in outputs.items()}
        made = {"cache_key": entry.key, "made_by": entry.run, "summary": entry.summary}
        reason = ", ".join([reason, *accepted])
        self.recorder.tracker(planned.key).record("step_cached", outputs=refs, reason=reason, **made)
        return outputs

    def _call(
        self, planned: PlannedStep, config: Any, inputs: Mapping[str, Artifact], work: WorkFolder
    ) -> tuple[dict[str, OutputSlot], dict[str, Any], float]:
        function = imported(planned.manifest.step.entry or "", planned)
        slots, run_id = work.prepare(planned.produces), self.recorder.folder.id
        tracker, started = self.recorder.tracker(planned.key), time.monotonic()
        context = StepContext(config, inputs, slots, work.work, tracker, planned.step_id, run_id, self.started)
        try:
            function(context)
        except Exception as error:
            if was_interrupted(error):
                raise KeyboardInterrupt from error
            self.recorder.log_traceback(error)
            failure = as_steps_error(error, planned, work.path, run_id)
            raise name_users_files(failure, inputs.values()) from error
        summary = dict(self.recorder.summaries[planned.key])
        seconds = time.monotonic() - started
        work.mark_filled(slots, summary, seconds)
        return slots, summary, seconds

    def _journal_failure(self, planned: PlannedStep, error: StepsError) -> None:
        signals = self.recorder.signals[planned.key].values()
        found = advice.hints_for_failure(error, signals, planned.manifest, planned.config)
        hints = (*error.hints, *(hint.render() for hint in found))
        error.hints = tuple(advice.of_its_own(hint, planned, self.plan) for hint in hints)
        with unwritable_is_told(self.recorder.folder.path):
            trace = "".join(format_exception(error))
            self.recorder.tracker(planned.key).record("step_failed", error=error.to_dict(), traceback=trace)
            self._journal_hints(planned, found, failure=True)
            self.recorder.set_step(planned.key, FAILED)

    def _journal_hints(self, planned: PlannedStep, hints: Sequence[advice.Hint], *, failure: bool) -> None:
        for hint in hints:
            self.recorder.tracker(planned.key).record("hint", text=hint.render(), failure=failure, **hint.to_dict())

    def publish(self) -> None:
        """Copy the run's folder to a home that is elsewhere."""
        with unwritable_is_told(self.recorder.folder.path):
            self.recorder.folder.publish()

    def end(self, status: str, error: StepsError | None = None, traceback: str = "") -> None:
        """Journal the end and write the report. `traceback` is that of an error of nobody's step."""
        ran = sum(result.state == "ran" for result in self.results)
        counts = {"ran": ran, "cached": len(self.results) - ran, "seconds": time.monotonic() - self.started}
        self.recorder.finish(self.store, status, error, **counts, traceback=traceback)

    def end_badly(self, error: BaseException, signal_name: str | None) -> BaseException:
        """Journal a failure or interruption; returns the error to raise."""
        status = FAILED
        run_id, info = self.recorder.folder.id, self.recorder.info
        if isinstance(error, KeyboardInterrupt):
            status = INTERRUPTED
            what = f"interrupted by {signal_name or 'SIGINT'}; {kept(info.steps, self.store)}"
            error = InterruptedRunError(what, where=f"run {run_id}", hints=(f"steps run --resume {run_id}",))
        elif isinstance(error, OSError):
            error = as_storage_error(error, self.recorder.folder.path) or error
        if isinstance(error, StepsError):
            self.recorder.mask_error(error)
        else:
            self.recorder.log_traceback(error)
        shown = error if isinstance(error, StepsError) else StepFailedError(f"{type(error).__name__}: {error}")
        with unwritable_is_told(self.recorder.folder.path):
            self.end(status, shown, "".join(format_exception(error)) if shown is not error else "")
        return error
