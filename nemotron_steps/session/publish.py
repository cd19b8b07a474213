"""A model card from what a home has recorded of a model, and its upload to the Hugging Face hub."""

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice, starmap
from typing import Any

from nemotron_steps.artifacts.files import licence_in
from nemotron_steps.artifacts.integrity import place_of
from nemotron_steps.artifacts.lineage import lineage
from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.config.secrets import redact, redact_text
from nemotron_steps.errors import RequestError, RetryableError, StepsError, UnknownNameError, first_line
from nemotron_steps.manifest.registry import Registry, load_registry
from nemotron_steps.manifest.typegraph import TypeGraph
from nemotron_steps.runs.cache import config_of
from nemotron_steps.runs.log_format import in_words, is_change, values_of
from nemotron_steps.runs.report.data import read_report
from nemotron_steps.runs.run_folder import get_run, run_file
from nemotron_steps.session.run_request import RunRequest

_UNKNOWN = "not recorded"
_FACTS = ("architecture", "parameters", "dtype", "sequence_length", "rank")
_SNAPSHOT = re.compile(r"/models--([\w.-]+?)--([\w.-]+)/snapshots/(\w+)")
_HUB_SET = re.compile(r"hf://(?:datasets/)?([\w.-]+/[\w.-]+)")
_FOLDERS = re.compile(r"(?<![\w.:/…~])~?/(?:[\w.@+-]+/)*(?=[\w.@+-])")
"""Of a path of this machine all but its last part."""
_FOLDERS_OF_VALUE = re.compile(
    r"""(^|[=,'"\[{(]\s*|:(?!//)\s*)(?:file:(?://[\w.-]*)?(?=/)|~[\w.-]*|\.\.?)?"""
    r"""/(?:(?:[^,:'"]|['"](?=\w))*/)?(?=[^/\s,:'"])"""
)
"""The same where a value is known to be one, or several: with blanks, a scheme, from a home or from here."""


def is_model(type_name: str, types: TypeGraph) -> bool:
    """Whether artifacts of a type are checkpoints or adapters; `types`: the registry's, read anew at every load."""
    names = types.ancestors(type_name) if type_name in types else (type_name,)
    return any(name.startswith(("checkpoint", "adapter")) for name in names)


def hf_request(artifact: Artifact, registry: Registry) -> RunRequest | None:
    """What makes a model's Hugging Face folder; None for what is one. RequestError for what has no such form."""
    steps = registry.types.path(artifact.type, "checkpoint_hf")
    if steps is None:
        what, hints = f"{artifact.ref} has no Hugging Face form", (f"steps artifacts export {artifact.ref} DIR",)
        raise RequestError(what, where="--hf", expected="a checkpoint or an adapter", found=artifact.type, hints=hints)
    if not steps:
        return None
    last = steps[-1]
    ports = (each for each in registry.step(last.step_id).consumes if registry.types.is_a(last.source, each.type))
    return RunRequest((last.step_id,), inputs={next(ports).name: artifact.ref})


def without_folders(value: str) -> str:
    """A value of a command or a config; of the paths of this machine in it only the last part."""
    return _FOLDERS_OF_VALUE.sub(r"\1…/", value)


def model_card(store: ArtifactStore, model: Artifact, repository: str, *, rows: bool = False) -> str:
    """README.md of a model: what it is, what it was made from and how, and what that changed. Secrets are masked, paths
    of this machine cut to their last part; rows of the data are in it only with `rows`."""
    records, types = {each.ref: each for each in store.list_artifacts()}, load_registry().types
    above = [ref for ref in dict.fromkeys(link.parent for link in lineage(store, model).ancestors) if ref in records]
    data = [records[ref] for ref in above if not is_model(records[ref].type, types)]
    # Back to the base: teachers and judges stand after the policy among a step's inputs.
    chain, known = [model], dict(records)
    while parents := [known[e.ref] for e in chain[-1].inputs if e.ref in known and is_model(known[e.ref].type, types)]:
        chain.append(known.pop(parents[0].ref))
    base, licence = chain[-1], _licence(store, model)
    hub = _SNAPSHOT.search(base.source)
    sources = [_sources(store, each) for each in data]
    head = {
        "license": licence if licence != _UNKNOWN else None,
        "base_model": f"{hub[1]}/{hub[2]}" if hub else None,
        "datasets": [name for each in sources for name in dict.fromkeys(_HUB_SET.findall(each))],
        "library_name": "peft" if model.type == "adapter" else "transformers",
        "tags": ["nemotron-steps", *dict.fromkeys(each.producer.step for each in chain if each.producer)],
    }
    about = [(name.replace("_", " "), model.attributes[name]) for name in _FACTS if name in model.attributes]
    about += [("artifact", f"{model.ref} ({model.type})"), ("digest", model.digest), ("licence", licence)]
    text = f"# {repository.partition('/')[2]}\n\n{_table(('', ''), about)}\n## Base model\n\n"
    text += f"{head['base_model']} at revision {hub[3]}" if hub else base.ref
    text += ", made without another" if base.producer else f", licence: {_licence(store, base)}"
    text += "\n\n## How it was made\n\n"
    for each in reversed(chain):
        if each.producer is not None:
            command, summary = _run_of(store, each)
            inputs = ", ".join(f"{edge.port} `{edge.ref or edge.digest[:12]}`" for edge in each.inputs)
            text += f"`{each.ref}` by `{each.producer.step}`" + (f" from {inputs}" if inputs else "") + ":\n\n"
            text += f"```\n{f'steps run {command}' if command else f'command {_UNKNOWN}'}\n```\n\n"
            shown = [(k, in_words(k, v)) for k, v in summary.items() if is_change(v) or isinstance(v, int | float)]
            text += f"{_table(('metric', 'before → after'), shown)}\n" if shown else ""
    counts = [values_of(each.attributes.get("rows", _UNKNOWN)) for each in data]
    told = [(d.ref, d.type, counts[n], sources[n], _licence(store, d)) for n, d in enumerate(data)]
    text += f"## Data\n\n{_table(('artifact', 'type', 'rows', 'sources', 'licence'), told) if told else _UNKNOWN}\n"
    text = _FOLDERS.sub("…/", text)
    for each in data if rows else ():
        if path := store.open(each).jsonl():
            with path.open(encoding="utf-8") as file:
                text += f"First rows of `{each.ref}`:\n\n````\n{''.join(islice(file, 3))}````\n\n"
    import yaml

    front = yaml.safe_dump({name: value for name, value in head.items() if value}, sort_keys=False, allow_unicode=True)
    return redact_text(f"---\n{front}---\n\n{text}")


def upload(artifact: Artifact, card: str, repository: str, *, public: bool) -> str:
    """Put a verified model and its card into a repository of the hub, in one commit that deletes what else is there
    (old weights would be loaded); its address.

    Raises RequestError for one that everybody can read, without `public`, and where the hub refuses, RetryableError
    where it does not answer."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api, command = HfApi(), f"steps publish {artifact.ref} {repository}"
    files: dict[str, Any] = {each.path: str(artifact.path / each.path) for each in artifact.files}
    files["README.md"] = card.encode()
    try:
        address = api.create_repo(repository, private=not public, exist_ok=True)
        if not public and not api.repo_info(repository).private:
            raise RequestError("everybody can read this repository", where=repository, hints=(f"{command} --public",))
        old = {*api.list_repo_files(repository)} - {*files, ".gitattributes"}
        operations: list[Any] = [*starmap(CommitOperationAdd, files.items()), *map(CommitOperationDelete, sorted(old))]
        api.create_commit(repository, operations, commit_message=f"{artifact.ref} {artifact.digest[:12]}")
    except StepsError:
        raise
    except Exception as error:  # of requests or of httpx, as huggingface_hub's version has it
        status = getattr(getattr(error, "response", None), "status_code", 400 if isinstance(error, ValueError) else 500)
        refused = status < 500 and status not in (408, 429)
        found = redact_text(f"{type(error).__name__}: {first_line(error)}")
        hints = ("hf auth whoami   # its token must be one that may write", f"{command} --folder DIR")
        what = f"the hub {'refuses the upload' if refused else 'does not answer'}"
        raise (RequestError if refused else RetryableError)(what, where=repository, found=found, hints=hints) from error
    return str(address)


def _run_of(store: ArtifactStore, artifact: Artifact) -> tuple[str, Mapping[str, Any]]:
    """The command of the run that made an artifact, and what its step reported; empty where the run is gone."""
    made = artifact.producer
    with suppress(StepsError, ValueError):
        info = get_run(store, made.run if made else "")
        for name in ("run.json", "plan.json", "events.jsonl"):
            with suppress(UnknownNameError):
                run_file(store, info.id, name)
        report = read_report(store.backend.local(f"runs/{info.id}"), store)
        steps = (step.summary for step in report.steps if made and step.cache_key == made.made_under)
        words = shlex.split(RunRequest.from_dict(info.request).redacted().command)
        return shlex.join(map(without_folders, words)), redact(next(steps, {}))
    return "", {}


def _sources(store: ArtifactStore, artifact: Artifact) -> str:
    """Where data comes from, as its preparation's config names it."""
    config = redact(config_of(store, artifact) or {})
    jsonl = config.get("jsonl") or {}
    found = [artifact.source, config.get("input_path"), config.get("blend_path"), jsonl.get("path")]
    found += [f"reasoning_gym {task['dataset']}" for task in (config.get("reasoning_gym") or {}).get("tasks") or ()]
    if config.get("blend_path"):
        with suppress(StepsError, OSError, ValueError, LookupError):
            found += json.loads((store.open(artifact).path / "accounting.json").read_bytes())["sources"]
    told = map(str, filter(None, found or [edge.ref for edge in artifact.inputs]))
    return ", ".join(map(without_folders, told)) or _UNKNOWN


def _licence(store: ArtifactStore, artifact: Artifact) -> str:
    """`license` among its attributes, or in the front matter of its README.md."""
    found = artifact.attributes.get("license")
    with suppress(StepsError, OSError):
        found = found or licence_in(place_of(store, artifact))
    return str(found or _UNKNOWN)


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    cells = [[" ".join(str(cell).replace("|", "\\|").split()) for cell in row] for row in rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in [head, ["---"] * len(head), *cells])
