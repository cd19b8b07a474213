"""Advice from a step's manifest for a failure (`[[errors]]`) or a signal (`[[strategies]]`), and the checks of a
stage's results that its pipeline states."""

import re
import shlex
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from nemotron_steps.artifacts.files import as_float
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.config.names import nearest
from nemotron_steps.errors import CheckFailedError, JudgeUnavailableError, StepFailedError, StepsError
from nemotron_steps.manifest.models import ErrorHint, StepManifest
from nemotron_steps.manifest.pipeline_models import StageCheck
from nemotron_steps.resolver.plan import Plan, PlannedStep, StepOutput, SuppliedInput
from nemotron_steps.runs.log_format import number, signal_text
from nemotron_steps.runs.run_folder import keys_of, read_events

_CODE = re.compile(r"E\d{3}")
_OVERRIDES = re.compile(r"[~+]{0,2}[A-Za-z_][\w.]*=")
_OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemoryError|cannot allocate memory", re.IGNORECASE)


@dataclass(frozen=True)
class Signal:
    """A warning sign a step raised, with the numbers that raised it (the last time it did)."""

    name: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
    count: int = 1


@dataclass(frozen=True)
class Hint:
    """One piece of advice, from the manifest."""

    name: str
    """The signal or the manifest's name of the error."""
    because: str
    """What was seen: a signal with the run's numbers, or the manifest's name of the error."""
    advice: str
    overrides: tuple[str, ...] = ()
    skill: str | None = None

    def render(self) -> str:
        """One line: the overrides, which can be pasted as they stand, and why behind `#`."""
        text = f"{self.because}: {self.advice}"
        return f"{' '.join(self.overrides)}   # {text}" if self.overrides else text

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable form."""
        return {**asdict(self), "overrides": list(self.overrides)}


def hints_for_failure(
    error: BaseException, signals: Iterable[Signal], manifest: StepManifest, config: Mapping[str, Any]
) -> list[Hint]:
    """Advice for a failed step: matching errors first, then the signals it had raised."""
    found = [
        Hint(entry.name, entry.name.replace("_", " "), entry.recovery, entry.overrides_for(config), entry.skill)
        for entry in manifest.errors
        if _matches(entry, error)
    ]
    own = []  # signals that the failure itself amounts to
    if any(isinstance(each, MemoryError) or _OUT_OF_MEMORY.search(repr(each)) for each in _chain(error)):
        own.append(Signal("out_of_memory"))
    if any(isinstance(each, JudgeUnavailableError) for each in _chain(error)):
        own.append(Signal("judge_unavailable"))
    return [*found, *hints_for_signals([*signals, *own], manifest, config)]


def of_its_own(hint: str, planned: PlannedStep, plan: Plan) -> str:
    """A hint for a step that the plan put there: overrides become a command for that step alone, since behind the one
    that was typed they would be for the steps that it names. Any other hint is as it was."""
    text, _, comment = hint.partition("   # ")
    inputs = [(key, port, s) for key in plan.goals for port, s in plan.step(key).inputs.items()]
    read = [(key, port, s.port) for key, port, s in inputs if isinstance(s, StepOutput) and s.step_key == planned.key]
    given = [f"{port}={source.ref}" for port, source in planned.inputs.items() if isinstance(source, SuppliedInput)]
    if not (planned.inserted and read and _OVERRIDES.match(text)) or len(given) < len(planned.inputs):
        return hint
    config = [] if planned.config_name == "default" else ["-c", planned.config_name]
    words = ["steps", "run", planned.step_id, *config, *(word for each in given for word in ("--input", each))]
    key, port, made = read[0]
    target = port if len(plan.goals) == 1 else f"{key}.{port}"
    then = f"then --input {target}={planned.step_id}/{made}" + (f" ({comment})" if comment else "")
    return f"{shlex.join(words)} {text}   # {then}"


def hints_for_signals(signals: Iterable[Signal], manifest: StepManifest, config: Mapping[str, Any]) -> list[Hint]:
    """Advice for signals: every strategy that answers one, in the manifest's order, each once."""
    found: list[Hint] = []
    for strategy in manifest.strategies:
        signal = next((signal for signal in signals if signal.name in strategy.signal), None)
        if signal is not None:
            seen, text = signal_text(signal.name, signal.numbers, signal.count), f"{strategy.when}: {strategy.then}"
            found.append(Hint(signal.name, seen, text, strategy.overrides_for(config), strategy.skill))
    return found


def _matches(entry: ErrorHint, error: BaseException) -> bool:
    for each in _chain(error):
        if type(each) is StepFailedError and each.__cause__ is not None:
            continue  # the runner's wrapper around what the step really raised, which comes next
        classes = {cls.__name__ for cls in type(each).__mro__}
        for pattern in entry.match:
            if _CODE.fullmatch(pattern):
                if isinstance(each, StepsError) and each.code == pattern:
                    return True
            elif pattern in classes or re.search(pattern, f"{type(each).__name__}: {each}", re.IGNORECASE):
                return True
    return False


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


class FailedCheck(NamedTuple):
    """A check that does not hold, and what was found."""

    check: StageCheck
    found: str

    def __str__(self) -> str:
        return f"{self.check.metric}: {self.found}, should be {self.check.expected}"


def failed_checks(
    checks: Sequence[StageCheck], summary: Mapping[str, Any], store: ArtifactStore, made_by: str, cache_key: str
) -> list[FailedCheck]:
    """Every check that does not hold. A number that is not there fails its check."""
    values = flat_numbers(summary)
    if any(check.metric not in values for check in checks):
        keys = keys_of(store, made_by, cache_key)
        recorded = read_events(store, made_by, "metrics") if keys else []
        last = [flat_numbers(record["values"]) for record in recorded if record.get("step") in keys]
        values = {**dict(ChainMap(*reversed(last))), **values}
    failed = []
    for check in checks:
        value = values.get(check.metric)
        if value is None:
            close = nearest(check.metric, list(values))
            failed.append(FailedCheck(check, "no such number" + (f" (near: {', '.join(close)})" if close else "")))
        elif not check.holds(value):
            failed.append(FailedCheck(check, number(value)))
    return failed


def blocked(failed: Sequence[FailedCheck], planned: PlannedStep, run_id: str) -> CheckFailedError:
    """What ends a pipeline at a stage, with how to go on all the same."""
    return CheckFailedError(
        f"'{planned.key}' does not pass its checks; its results are kept",
        where=f"stage {planned.key}: {', '.join(each.check.metric for each in failed)}",
        expected="; ".join(each.check.expected for each in failed),
        found="; ".join(each.found for each in failed),
        hints=(f"steps run --resume {run_id} --ignore-checks {planned.key}   # go on all the same",),
    )


def flat_numbers(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a summary: NAME, of a change what it came to, of nested values NAME/ROW/COLUMN."""
    found: dict[str, float] = {}
    for name, value in values.items():
        nested = isinstance(value, Mapping)
        number = as_float(value.get("after") if nested and "before" in value else value)
        if number is not None:
            found[f"{prefix}{name}"] = number
        if nested:
            found |= flat_numbers(value, f"{prefix}{name}/")
    return found
