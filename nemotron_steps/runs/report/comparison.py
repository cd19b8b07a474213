"""What differs between runs: what was asked for, the composed configs, the results; and what makes them unlike."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from nemotron_steps.artifacts.compare import Values, differing, flat
from nemotron_steps.artifacts.files import plain
from nemotron_steps.artifacts.models import Edge, short_digest
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import ArtifactError, UnknownNameError
from nemotron_steps.runs.cache import recall
from nemotron_steps.runs.log_format import difference, figure, is_table
from nemotron_steps.runs.report.data import RunReport, StepReport
from nemotron_steps.runs.run_folder import called, list_runs

Rows = dict[str, Values]
"""Name → what each run has there, in their order."""

_REWARD = re.compile(
    r"config (reward|env\.|grpo\.reward_|(heldout|evaluation)\.environment)|input reward_model|file |code environments/"
)
"""What a step's rewards depend on, of what it depends on (docs/cache_keys.md)."""
_HELDOUT = re.compile(r"heldout |config (data\.(validation|heldout|data_path)|(heldout|evaluation)\.max_prompts)")
_SPLIT = re.compile(r"(heldout|test|validation|val)\b")
_MODEL = re.compile("checkpoint|model|adapter")


def compare(runs: Sequence[RunReport], store: ArtifactStore) -> dict[str, Any]:
    """As JSON-serialisable fields: `runs`, `unlike` (sentences), `requests` (what of them differs), `configs` (step →
    the keys, inputs and files that differ), `results` (step → measure → value and difference to the first)."""
    every, steps = list_runs(store), [steps_of(run) for run in runs]
    names = [next((called(info, every) for info in every if info.id == run.id), run.id) for run in runs]
    goals = [sorted({step.plan.get("step", step.key) for step in run.steps if step.key in run.goals}) for run in runs]
    unlike, configs, results = list[str](), dict[str, Rows](), dict[str, Rows]()
    if any(each != goals[0] for each in goals):
        of: dict[str, list[str]] = {}
        for name, ids in zip(names, goals, strict=True):
            of.setdefault(", ".join(ids), []).append(name)
        which = "; ".join(f"{', '.join(theirs)}: {ids}" for ids, theirs in of.items())
        unlike.append(f"different steps ({which}): what they report may not be comparable")
    asked_for = {key for run, each in zip(runs, steps, strict=True) for key in each if each[key].key in run.goals}
    for key in sorted(dict.fromkeys(key for each in steps for key in each), key=lambda key: key not in asked_for):
        found = [(run, each.get(key)) for run, each in zip(runs, steps, strict=True)]
        results[key] = _results([step.summary if step else {} for _, step in found])
        composed = [flat(_config(run, step)) if step else None for run, step in found]
        depends = [_depends(run, step, store) if step else None for run, step in found]
        if {} in depends:  # of a step that is not done, what it depends on is not recorded
            depends = [each and {f"config {name}": value for name, value in each.items()} for each in composed]
        configs[key], changed = dict(differing(*composed)), differing(*depends)
        refs = {edge.digest: edge.ref for run, step in found if step for edge in _inputs(run, step)}
        for name in [name for name in changed if name.startswith(("input ", "file "))]:
            configs[key][name] = tuple(text and (refs.get(text) or short_digest(text)) for text in changed[name])
        rewarded = any("reward" in name for _, step in found if step for name in (*step.summary, *step.curves))
        for what, pattern in (("held-out prompts", _HELDOUT), ("reward", _REWARD)) if rewarded else ():
            if causes := [name.partition(" ")[2] for name in changed if pattern.match(name)]:
                why = ", ".join(causes[:4]) + (f" and {len(causes) - 4} more" if len(causes) > 4 else "")
                unlike.append(f"{key}: different {what} ({why}): their rewards are not comparable")
    fields: dict[str, Any] = {
        "runs": [{"id": run.id, "name": name} for run, name in zip(runs, names, strict=True)],
        "unlike": unlike,
        "requests": differing(*(_asked(run.request) for run in runs)),
        "configs": {key: rows for key, rows in configs.items() if rows},
        "results": {key: rows for key, rows in results.items() if rows},
    }
    return {name: plain(value) for name, value in fields.items()}


def steps_of(run: RunReport) -> dict[str, StepReport]:
    """By the step's id where one step alone has it, whatever a pipeline calls that; else by key."""
    ids = [step.plan.get("step") for step in run.steps]
    return {id_ if id_ and ids.count(id_) == 1 else step.key: step for id_, step in zip(ids, run.steps, strict=True)}


def _asked(request: Mapping[str, Any]) -> dict[str, Any]:
    """What was asked for → as it was given."""
    found = {"steps run": " ".join(request.get("targets") or []), "-c": request.get("config")}
    found |= {f"--input {port}": ref for port, ref in (request.get("inputs") or {}).items()}
    for flag in ("over", "overrides"):
        for key, equals, value in (text.partition("=") for text in request.get(flag) or []):
            found[f"--over {key}" if flag == "over" else key] = value if equals else key
    return found


def _config(run: RunReport, step: StepReport) -> dict[str, Any]:
    import yaml

    values = yaml.load(run.config, getattr(yaml, "CSafeLoader", yaml.SafeLoader)) or {}
    return values.get(step.key) or {}


def _inputs(run: RunReport, step: StepReport) -> Sequence[Edge]:
    return next((run.artifacts[ref].inputs for ref in step.outputs.values() if ref in run.artifacts), ())


def _depends(run: RunReport, step: StepReport, store: ArtifactStore) -> dict[str, str]:
    """What a step that is done depends on, with the digests of the rows that it is measured on."""
    found: dict[str, str] = {}
    with suppress(ArtifactError, UnknownNameError):
        entry = recall(store, step.cache_key) if step.cache_key else None
        found = dict(entry.depends or {}) if entry else {}
        for edge in _inputs(run, step) if found else ():
            given, found[f"input {edge.port}"] = store.find(edge.ref or edge.digest), edge.digest
            held = [file.sha256 for file in given.files if _SPLIT.match(file.path)]
            if not _MODEL.search(given.type):
                found[f"heldout {edge.port}"] = " ".join(held) or given.digest
    return found


def _results(summaries: Sequence[Mapping[str, Any]]) -> Rows:
    """Measure, or `NAME ROW COLUMN` of a table → of each run the value and the difference to the first that has it."""
    flats, rows = [dict[str, Any]() for _ in summaries], Rows()
    for found, summary in zip(flats, summaries, strict=True):
        for name, value in summary.items():
            cells = value.items() if is_table(value) else ()
            found |= {f"{name} {row} {column}": cell for row, each in cells for column, cell in each.items()}
            found |= {} if cells else {name: value}
    for name in dict.fromkeys(name for each in flats for name in each):
        first, row = None, list[Any]()
        for each in flats:
            then = figure(each, name) if name in each else None
            change: dict[str, Any] = difference(name, first, then, each[name]) if first and then else {}
            row.append(None if then is None else {"value": each[name], **change})
            first = first or then
        rows[name] = tuple(row)
    return rows
