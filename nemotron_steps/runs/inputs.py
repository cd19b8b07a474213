"""From a plan's input sources to opened artifacts, and from those to the config keys bound to them.

Also the checks of a port that can only be made once its artifact is there: type, attributes, constraints.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nemotron_steps.artifacts.files import sha256_file
from nemotron_steps.artifacts.imports import default_name
from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import ArtifactError, StepsError, UnknownNameError
from nemotron_steps.manifest.models import Consumes
from nemotron_steps.manifest.typegraph import TypeGraph
from nemotron_steps.resolver.plan import PlannedStep, SuppliedInput
from nemotron_steps.waiting import waiting

_MODEL_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def open_input(
    planned: PlannedStep,
    port: str,
    source: SuppliedInput,
    store: ArtifactStore,
    *,
    types: TypeGraph | None = None,
    fetch: bool = True,
) -> Artifact | None:
    """The artifact a user supplied for a port, verified.

    A path is used in place (see ArtifactStore.reference), a name or digest is looked up in the home, and a model
    hub name is downloaded. `types` tells which validator a type without one of its own has. With `fetch` false a
    hub model that is not on this machine gives None.

    Raises ArtifactError if there is no such thing or it is not what it should be.
    """
    consumes = planned.manifest.inputs[port]
    where = f"{planned.key}.{port}"
    path = Path(source.ref).expanduser()
    supertypes = types.ancestors(source.type) if types is not None and source.type is not None else ()
    if path.exists():
        return store.open(store.reference(path, type_name=source.type, supertypes=supertypes))
    try:
        return store.open(source.ref)
    except (UnknownNameError, ArtifactError) as error:
        named_here = isinstance(error, ArtifactError) and "is not an artifact reference" not in error.what
        if named_here or not _MODEL_NAME.fullmatch(source.ref) or not consumes.type.startswith("checkpoint"):
            if named_here:
                raise
            raise ArtifactError(
                f"input '{port}' is neither a path nor an artifact of this home",
                where=where,
                expected="PATH, NAME:VERSION or a digest",
                found=source.ref,
                hints=(f"--input {port}=PATH", "steps artifacts list", *error.hints[:1]),
            ) from error
    folder = _hub_folder(source.ref, planned, port, fetch=fetch)
    if folder is None:
        return None
    name = default_name(Path(source.ref))
    return store.open(store.reference(folder, type_name=source.type, supertypes=supertypes, name=name))


def bound_values(planned: PlannedStep, inputs: Mapping[str, Artifact]) -> dict[str, str]:
    """Dotted config key → path, for every binding that an input fills.

    A binding to `train.jsonl` or another split takes whatever the artifact calls that split, one to `A.jsonl|B.jsonl`
    the first that it has; a split other than `train` that the artifact lacks leaves its key as it is, and so does any
    other absent path whose binding ends in "?". An overridden key other than a port's first, which names the artifact,
    stays as the user set it.

    Raises ArtifactError or DataError if an artifact lacks what a binding names.
    """
    filled: dict[str, str] = {}
    overridden = {override.partition("=")[0].lstrip("+") for override in planned.overrides}
    for port, artifact in inputs.items():
        bindings = planned.manifest.inputs[port].bindings
        for key, inside in bindings.items():
            if key in overridden and key != next(iter(bindings)):
                continue
            if not inside:
                filled[key] = str(artifact.path)
            elif inside.endswith(".jsonl"):
                splits = [each.removesuffix(".jsonl") for each in inside.split("|")]
                found = next(filter(None, map(artifact.jsonl, splits)), None)
                if found is None and splits[-1] == "train":
                    artifact.require_jsonl("train")
                if found is not None:
                    filled[key] = str(found)
            elif (artifact.path / inside.removesuffix("?")).exists():
                filled[key] = str(artifact.path / inside.removesuffix("?"))
            elif not inside.endswith("?"):
                raise ArtifactError(
                    f"artifact '{artifact.ref}' has no '{inside}'",
                    where=f"{planned.key}.{port}",
                    expected=inside,
                    found=", ".join(sorted(p.name for p in artifact.path.iterdir())[:8]),
                )
    return filled


def filled_config(planned: PlannedStep, inputs: Mapping[str, Artifact]) -> dict[str, Any]:
    """The step's config values with every bound key set to its artifact's path."""
    values: dict[str, Any] = copy.deepcopy(dict(planned.config))
    for key, path in bound_values(planned, inputs).items():
        *parents, last = key.split(".")
        node = values
        for part in parents:
            if not isinstance(node.get(part), dict):
                node[part] = {}
            node = node[part]
        node[last] = path
    return values


def check_inputs(planned: PlannedStep, inputs: Mapping[str, Artifact], types: TypeGraph) -> None:
    """Check what could not be checked before the artifacts were there.

    Raises ArtifactError naming port, expected and found for a wrong type, a missing required input, an attribute
    with a value the port refuses, or two inputs that must agree and do not (architecture, tokenizer).
    """
    for consumes in planned.manifest.consumes:
        artifact = inputs.get(consumes.name)
        if artifact is None:
            if consumes.required:
                raise ArtifactError(
                    f"input '{consumes.name}' is missing",
                    where=f"{planned.key}.{consumes.name}",
                    expected=f"an artifact of type {consumes.type}",
                    hints=(f"--input {consumes.name}=PATH",),
                )
            continue
        if artifact.type != consumes.type and not types.is_a(artifact.type, consumes.type):
            raise ArtifactError(
                f"input '{consumes.name}' is of the wrong type",
                where=f"{planned.key}.{consumes.name} = {artifact.ref}",
                expected=consumes.type,
                found=artifact.type,
                hints=(f"steps list --produces {consumes.type}",),
            )
        _check_attributes(planned, consumes, artifact)
    for constraint in planned.manifest.constraints:
        values = {
            f"{port}.{attribute}": inputs[port].attributes[attribute]
            for port, attribute in constraint.terms
            if port in inputs and attribute in inputs[port].attributes
        }
        first = next(iter(values.items()), None)
        for term, value in values.items():
            if first is not None and value != first[1]:
                raise ArtifactError(
                    constraint.description or f"{first[0]} and {term} must be the same",
                    where=f"{planned.key}: {', '.join(f'{p} = {a.ref}' for p, a in inputs.items())}",
                    expected=f"{term} = {first[1]} (as {first[0]})",
                    found=f"{term} = {value}",
                )


def name_users_files(error: StepsError, inputs: Iterable[Artifact]) -> StepsError:
    """The error with the user's own files named where it names copies of them in the home, if they still are alike."""
    theirs: dict[str, str] = {}
    told = [text for text in (error.what, error.where, error.expected, error.found, *error.hints) if text]
    for artifact in inputs:
        if not artifact.source or Path(artifact.source) == artifact.path:
            continue
        for record in artifact.files:
            copy = str(artifact.path / record.path)
            source = Path(artifact.source)
            own = source if source.is_file() else source / record.path
            if any(copy in text for text in told) and own.is_file() and sha256_file(own) == record.sha256:
                theirs[copy] = str(own)

    def replaced(text: str) -> str:
        for copy, own in theirs.items():
            text = text.replace(copy, own)
        return text

    if theirs:
        error.what = replaced(error.what)
        error.where, error.expected, error.found = (
            None if text is None else replaced(text) for text in (error.where, error.expected, error.found)
        )
        error.hints = tuple(replaced(hint) for hint in error.hints)
    return error


def _check_attributes(planned: PlannedStep, consumes: Consumes, artifact: Artifact) -> None:
    for name, wanted in consumes.attributes.items():
        accepted = wanted if isinstance(wanted, list | tuple) else [wanted]
        found = artifact.attributes.get(name)
        if found not in accepted:
            raise ArtifactError(
                f"input '{consumes.name}' has the wrong {name}",
                where=f"{planned.key}.{consumes.name} = {artifact.ref}",
                expected=" or ".join(str(each) for each in accepted),
                found="not recorded" if found is None else str(found),
                hints=(f"steps artifacts show {artifact.ref}",),
            )


def _hub_folder(name: str, planned: PlannedStep, port: str, *, fetch: bool) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    patterns = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
    try:
        with waiting(f"the hub to send {name}"):
            return Path(snapshot_download(name, allow_patterns=patterns, local_files_only=not fetch))
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, OSError) as error:
        if not fetch:
            return None
        raise ArtifactError(
            f"model '{name}' could not be fetched from the model hub",
            where=f"{planned.key}.{port}",
            expected="a model folder, an artifact of this home, or a hub name that can be reached from here",
            found=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no answer'}",
            hints=(f"--input {port}=PATH_TO_MODEL_FOLDER",),
        ) from error
