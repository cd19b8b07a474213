"""What `--from STAGE` leaves out: earlier stages are not run, so what they left has to be there."""

from dataclasses import replace

from nemotron_steps.resolver.plan import Plan, PlannedStep, StepOutput
from nemotron_steps.resolver.problems import MissingInput, raise_all


def without_absent(plan: Plan, *, allow_unfilled: bool = False) -> Plan:
    """The plan, its steps looked up in the cache, without ports of many that only an absent earlier stage would feed.

    PlanError if a step needs what an earlier stage would have left, and it is not there; with `allow_unfilled` that is
    one of the plan's `unfilled` instead.
    """
    absent: dict[str, str] = {}  # earlier stages that would have to run, and converters of theirs → the stage
    for step in plan.steps:
        sources = [s.step_key for s in step.inputs.values() if isinstance(s, StepOutput)]
        if step.cached is None and step.earlier:
            absent[step.key] = step.key if step.instance is None else step.instance.stage
        elif step.cached is None and step.inserted and absent.keys() & set(sources):
            absent[step.key] = next(absent[key] for key in sources if key in absent)
    if not absent:
        return plan
    steps, problems, notes = {}, [], list(plan.warnings)
    for step in plan.steps:
        lacking = {p: s.step_key for p, s in step.inputs.items() if isinstance(s, StepOutput) and s.step_key in absent}
        if step.key in absent or not lacking:
            steps[step.key] = step
            continue
        fed = {port.partition(".")[0] for port in step.inputs if port not in lacking}
        # One of those of a port that takes many, others of which are fed.
        optional = {port: key for port, key in lacking.items() if "." in port and port.partition(".")[0] in fed}
        if optional:
            names = ", ".join(optional)
            notes.append(f"{step.key} goes without {names}: nothing here was made by these stages as they are planned")
        problems += [_missing(plan, step, port, key, absent) for port, key in lacking.items() if port not in optional]
        ports = tuple(port for port in step.manifest.consumes if port.name not in optional)
        inputs = {port: source for port, source in step.inputs.items() if port not in optional}
        steps[step.key] = replace(step, manifest=step.manifest.with_ports(ports), inputs=inputs)
    if not allow_unfilled:
        raise_all(problems, f"cannot plan '{plan.name}'")
    needed = _needed(plan.goals, steps)
    kept = tuple(steps[step.key] for step in plan.steps if step.key in needed)
    return replace(plan, steps=kept, warnings=tuple(notes), unfilled=(*plan.unfilled, *problems))


def _missing(plan: Plan, step: PlannedStep, port: str, key: str, absent: dict[str, str]) -> MissingInput:
    stage = absent[key]
    before = _needed((key,), {each.key: each for each in plan.steps})
    first = next(absent[each.key] for each in plan.steps if each.key in before and each.key in absent)
    changes = plan.step(key).changes
    accept = (f"--accept {key}   # its code alone changed",) if changes is not None and changes.code else ()
    return MissingInput(
        f"'{port}' of {step.key} is what {stage} leaves, a stage before the first one asked for, and it is not here",
        chain=(stage, f"{step.key}.{port}"),
        expected=f"a result of {stage} as it is planned now, or another one given for it",
        found="none in this home",
        hints=(*accept, f"--input {step.key}.{port}=PATH", f"--from {first}   # makes it"),
    )


def _needed(goals: tuple[str, ...], steps: dict[str, PlannedStep]) -> set[str]:
    """Keys of the goals and of everything they read from."""
    seen = list(goals)
    for key in seen:
        read = (source.step_key for source in steps[key].inputs.values() if isinstance(source, StepOutput))
        seen += [each for each in read if each not in seen]
    return set(seen)
