"""What a step reads, works in and leaves: its inputs, its work folder, its outputs.

The work folder is one per cache key, under a lock, and survives every kind of death:

work/<key>/work/             the step's own: training checkpoints
work/<key>/outputs/<port>/   what the step is filling
work/<key>/filled.json       the step returned; only committing is left
work/<key>.lock              held while someone works on the key
"""

import copy
import re
import shlex
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nemotron_steps import __version__
from nemotron_steps.artifacts.files import (
    as_storage_error,
    free_bytes,
    licence_in,
    plain,
    remove_tree,
    sha256_file,
    storage_errors,
    to_json_bytes,
    write_atomic,
)
from nemotron_steps.artifacts.imports import default_name
from nemotron_steps.artifacts.models import Artifact, Edge, Producer
from nemotron_steps.artifacts.records import NUMBER, json_object, require_shape
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.config.locations import cache_folder
from nemotron_steps.errors import (
    ArtifactError,
    DataError,
    StepFailedError,
    StepsError,
    StorageError,
    UnknownNameError,
    UnsupportedError,
    first_line,
    of_run,
)
from nemotron_steps.errors.plugins import load_object
from nemotron_steps.manifest.typegraph import TypeGraph
from nemotron_steps.resolver.plan import PlannedStep, SuppliedInput
from nemotron_steps.runs.context import OutputSlot
from nemotron_steps.runs.locks import hold_if_free
from nemotron_steps.waiting import waiting


class WorkFolder:
    """The work folder of one cache key. Every method but `remove_if_abandoned` needs the lock to be held."""

    def __init__(self, root: Path, key: str) -> None:
        self.root, self.key = root, key
        self.lock = root / f"{key}.lock"  # stays when the folder goes
        self.path = root / key
        self.work = self.path / "work"  # the step's own
        self._outputs = self.path / "outputs"
        self._filled = self.path / "filled.json"

    def has_progress(self) -> bool:
        """Whether an earlier attempt left something to continue from."""
        return self._filled.is_file() or (self.work.is_dir() and any(self.work.iterdir()))

    def note_depends(self, depends: Mapping[str, str]) -> None:
        """Write down what this key is the digest of (`cache_key.recorded`)."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path / "depends.json", to_json_bytes(dict(depends)))

    def noted_depends(self) -> dict[str, str] | None:
        """What `note_depends` wrote; None in a folder from before it did."""
        note = self.path / "depends.json"
        if not note.is_file():
            return None
        return {name: str(value) for name, value in json_object(note.read_bytes(), str(note)).items()}

    def prepare(self, produces: Mapping[str, str]) -> dict[str, OutputSlot]:
        """Empty slots for a step about to run; what a killed attempt half filled is cleared."""
        self.reject()
        self.work.mkdir(parents=True, exist_ok=True)
        slots = {port: OutputSlot(type_name, self._outputs / port) for port, type_name in produces.items()}
        for slot in slots.values():
            slot.path.mkdir(parents=True)
        return slots

    def mark_filled(self, slots: Mapping[str, OutputSlot], summary: Mapping[str, Any], seconds: float) -> None:
        """The step returned: from here on a killed run only has to commit."""
        filled = {port: {"type": slot.type, "attributes": slot.attributes} for port, slot in slots.items()}
        record = {"slots": filled, "summary": dict(summary), "seconds": seconds}
        write_atomic(self._filled, to_json_bytes(plain(record)))

    def filled(self, produces: Mapping[str, str]) -> tuple[dict[str, OutputSlot], dict[str, Any], float] | None:
        """(slots, summary, seconds) an earlier attempt filled and did not commit; None if there are none."""
        if not self._filled.is_file():
            return None
        record = json_object(self._filled.read_bytes(), str(self._filled))
        # Its ports name folders to be moved into the home: they must be the step's own.
        slot = {port: {"type": re.compile(re.escape(name)), "attributes": dict} for port, name in produces.items()}
        hints = (f"rm {shlex.quote(str(self._filled))}   # then the step runs again, from its checkpoints",)
        require_shape(record, {"slots": slot, "summary": dict, "seconds": NUMBER}, str(self._filled), hints)
        slots = {
            port: OutputSlot(s["type"], self._outputs / port, s["attributes"]) for port, s in record["slots"].items()
        }
        # None if killed between two outputs' commits: the step is asked again, and finds its checkpoints.
        whole = all(slot.path.is_dir() for slot in slots.values())
        return (slots, record["summary"], float(record["seconds"])) if whole else None

    def reject(self) -> None:
        """What the step filled is not valid: forget it, keep the step's own folder."""
        self._filled.unlink(missing_ok=True)
        remove_tree(self._outputs)

    def remove_if_abandoned(self) -> None:
        """Everything is committed: remove what a kill just before `remove` left, unless someone is at work in it."""
        if self.path.exists():
            with hold_if_free(self.lock) as free:
                if free:
                    self.remove()

    def remove(self) -> None:
        """Everything is committed, or must start over."""
        # First, so that a kill in the middle of the deletion leaves nothing that looks complete.
        self._filled.unlink(missing_ok=True)
        remove_tree(self.path)


def stage_outputs(
    planned: PlannedStep,
    slots: Mapping[str, OutputSlot],
    work: WorkFolder,
    store: ArtifactStore,
    types: TypeGraph,
    inputs: Mapping[str, Artifact],
    run_id: str,
    key: str,
) -> dict[str, Artifact]:
    """What a step filled, checked and ready to publish; rejected in the work folder where it is not valid."""
    edges = tuple(Edge(port, artifact.digest, artifact.ref) for port, artifact in inputs.items())
    staged: dict[str, Artifact] = {}
    filled = {port: slot for port, slot in slots.items() if any(path.is_file() for path in slot.path.rglob("*"))}
    for port in slots.keys() - filled.keys():
        if planned.manifest.outputs[port].required:
            work.reject()
            what, slot = f"step '{planned.step_id}' left its output '{port}' empty", slots[port]
            raise StepFailedError(what, where=str(slot.path), expected=f"a {slot.type}", found="no file")
    for port, slot in filled.items():
        made = planned.manifest.step.version, key, planned.config_name
        producer = Producer(planned.step_id, port, run_id, *made, package=__version__)
        try:
            with storage_errors(slot.path):
                staged[port] = store.stage(
                    slot.path,
                    slot.type,
                    name=artifact_name(planned.step_id, port),
                    supertypes=types.ancestors(slot.type),
                    attributes=slot.attributes,
                    producer=producer,
                    inputs=edges,
                )
        except (ArtifactError, DataError) as error:
            work.reject()
            what = f"step '{planned.step_id}' left an output '{port}' that is not a valid {slot.type}: {error.what}"
            raise StepFailedError(what, where=error.where, expected=error.expected, found=error.found) from error
    return staged


def artifact_name(step_id: str, port: str) -> str:
    """What an output is called: a pack's folder, in `PACK:ID`, may have a name that no artifact can have."""
    return re.sub(r"[^A-Za-z0-9._/-]", "-", step_id.replace(":", "/")) + f"/{port}"


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
    """The artifact a user supplied for a port, verified: a path, used in place, a name or digest of the home, or a
    model of the hub, which is None without `fetch` if it is not on this machine."""
    consumes = planned.manifest.inputs[port]
    where, path = f"{planned.key}.{port}", Path(source.ref).expanduser()
    supertypes = types.ancestors(source.type) if types is not None and source.type is not None else ()
    if path.exists():
        return store.open(store.reference(path, type_name=source.type, supertypes=supertypes))
    try:
        return store.open(source.ref)
    except (UnknownNameError, ArtifactError) as error:
        if isinstance(error, ArtifactError) and "is not an artifact reference" not in error.what:
            raise
        if not _MODEL_NAME.fullmatch(source.ref) or not consumes.type.startswith("checkpoint"):
            raise ArtifactError(
                f"input '{port}' is neither a path nor an artifact of this home",
                where=where,
                expected="PATH, NAME:VERSION or a digest",
                found=source.ref,
                hints=(f"--input {port}=PATH", "steps artifacts list", *error.hints[:1]),
            ) from error
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    patterns = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
    try:
        with waiting(f"the hub to send {source.ref}"):
            folder = Path(snapshot_download(source.ref, allow_patterns=patterns, local_files_only=not fetch))
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, OSError) as error:
        if not fetch:
            return None
        raise ArtifactError(
            f"model '{source.ref}' could not be fetched from the model hub",
            where=where,
            expected="a model folder, an artifact of this home, or a hub name that can be reached from here",
            found=f"{type(error).__name__}: {first_line(error)}",
            hints=(f"--input {port}=PATH_TO_MODEL_FOLDER",),
        ) from error
    # Not beside the weights, whose digest it would change.
    name, card = default_name(Path(source.ref)), cache_folder() / "cards" / source.ref / folder.name
    with suppress(Exception):  # the hub client raises many unrelated classes; no run fails for want of a card
        if fetch and not card.exists():
            said = HfApi().model_info(source.ref, revision=folder.name, timeout=5).card_data
            write_atomic(card / "README.md", f"---\n{said.to_yaml() if said else ''}\n---\n".encode())
    licence = licence_in(card)
    return store.open(store.reference(folder, type_name=source.type, supertypes=supertypes, name=name, licence=licence))


def bound_values(planned: PlannedStep, inputs: Mapping[str, Artifact]) -> dict[str, str]:
    """Dotted config key → path, for every binding that an input fills: a split under whatever name the artifact has it,
    of `A.jsonl|B.jsonl` the first. A split other than `train` may be absent, and a path whose binding ends in "?". An
    overridden key other than a port's first stays as the user set it."""
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


def check_inputs(planned: PlannedStep, inputs: Mapping[str, Artifact], types: TypeGraph) -> None:
    """Check what could not be checked before the artifacts were there."""
    for consumes in planned.manifest.consumes:
        name, artifact = consumes.name, inputs.get(consumes.name)
        where = f"{planned.key}.{name}" + (f" = {artifact.ref}" if artifact is not None else "")
        if artifact is None:
            if consumes.required:
                expected, hints = f"an artifact of type {consumes.type}", (f"--input {name}=PATH",)
                raise ArtifactError(f"input '{name}' is missing", where=where, expected=expected, hints=hints)
            continue
        if artifact.type != consumes.type and not types.is_a(artifact.type, consumes.type):
            what, hints = f"input '{name}' is of the wrong type", (f"steps list --produces {consumes.type}",)
            raise ArtifactError(what, where=where, expected=consumes.type, found=artifact.type, hints=hints)
        for attribute, wanted in consumes.attributes.items():
            accepted = wanted if isinstance(wanted, list | tuple) else [wanted]
            found = artifact.attributes.get(attribute)
            if found not in accepted:
                raise ArtifactError(
                    f"input '{name}' has the wrong {attribute}",
                    where=where,
                    expected=" or ".join(map(str, accepted)),
                    found="not recorded" if found is None else str(found),
                    hints=(f"steps artifacts show {artifact.ref}",),
                )
    for constraint in planned.manifest.constraints:
        values = {
            f"{port}.{attribute}": inputs[port].attributes[attribute]
            for port, attribute in constraint.terms
            if port in inputs and attribute in inputs[port].attributes
        }
        for term, value in values.items():
            first, same = next(iter(values.items()))
            if value != same:
                raise ArtifactError(
                    constraint.description or f"{first} and {term} must be the same",
                    where=f"{planned.key}: {', '.join(f'{p} = {a.ref}' for p, a in inputs.items())}",
                    expected=f"{term} = {same} (as {first})",
                    found=f"{term} = {value}",
                )


def name_users_files(error: StepsError, inputs: Iterable[Artifact]) -> StepsError:
    """The error with the user's own files named where it names copies of them in the home, if they still are alike."""
    texts = [text for text in (error.what, error.where, error.expected, error.found, *error.hints) if text]
    for artifact in inputs:
        if not artifact.source or Path(artifact.source) == artifact.path:
            continue
        for record in artifact.files:
            copy, source = str(artifact.path / record.path), Path(artifact.source)
            own = source if source.is_file() else source / record.path
            if not any(copy in text for text in texts) or not own.is_file() or sha256_file(own) != record.sha256:
                continue
            for name in ("what", "where", "expected", "found"):
                text = getattr(error, name)
                setattr(error, name, text and text.replace(copy, str(own)))
            error.hints = tuple(hint.replace(copy, str(own)) for hint in error.hints)
    return error


ENGINE = "pip install 'nemotron-steps[engine]'"
"""What brings the packages that train and generate."""
ENGINE_PACKAGES = frozenset(
    {"reasoning_gym", "math_verify", "psutil"}
    | {"torch", "megatron", "transformers", "tokenizers", "safetensors", "numpy"}
)
_ALMOST_NOTHING = 1 << 20
"""With less than this many bytes free, a failure of a writing library is taken for a full disk."""


def imported(reference: str, planned: PlannedStep) -> Any:
    """The function that a manifest names as `module:name`. UnsupportedError if it cannot be imported."""
    try:
        return load_object(reference)
    except ImportError as error:
        raise UnsupportedError(
            f"step '{planned.step_id}' cannot be imported: {error}",
            where=getattr(error, "line", None) or planned.manifest.where("step", "entry"),
            found=reference,
            hints=(ENGINE, "steps doctor") if _of_engine(error) else ("steps doctor",),
        ) from error
    except AttributeError as error:
        raise UnsupportedError(
            f"step '{planned.step_id}' names a function that does not exist",
            where=planned.manifest.where("step", "entry"),
            expected="a function '{2}' in {0}".format(*reference.partition(":")),
            found=reference,
        ) from error


def _of_engine(error: BaseException) -> bool:
    """Whether an import failed because the engine's packages are not installed."""
    missing = error if isinstance(error, ModuleNotFoundError) else error.__cause__
    return isinstance(missing, ModuleNotFoundError) and (missing.name or "").partition(".")[0] in ENGINE_PACKAGES


def validated_config(planned: PlannedStep, inputs: Mapping[str, Artifact]) -> Any:
    """The step's config model with input paths filled in; plain values for a step without a schema."""
    values: dict[str, Any] = copy.deepcopy(dict(planned.config))
    for key, path in bound_values(planned, inputs).items():
        *parents, last = key.split(".")
        node = values
        for part in parents:
            if not isinstance(node.get(part), dict):
                node[part] = {}
            node = node[part]
        node[last] = path
    reference = planned.manifest.step.config_schema
    if reference is None:
        return values
    from nemotron_steps.config.compose import ComposedConfig
    from nemotron_steps.config.validation import load_schema, validate

    return validate(ComposedConfig(planned.step_id, values), load_schema(reference))


def as_steps_error(error: Exception, planned: PlannedStep, work: Path, run_id: str) -> StepsError:
    """What a step raised, as an error of this package."""
    if isinstance(error, StepsError) and not isinstance(error, StorageError):
        return of_run(error, run_id)
    if _of_engine(error):
        return UnsupportedError(
            f"step '{planned.step_id}' needs a package of the engine: {error}",
            where=planned.manifest.where("step", "entry"),
            hints=(ENGINE,),
        )
    storage = as_storage_error(error, work)
    if storage is not None:
        return storage
    if (free := free_bytes(work)) < _ALMOST_NOTHING:
        hint = "free some space and run the same command again: committed artifacts and checkpoints are kept"
        what = f"the step failed while the disk is full: {error}"
        return StorageError(what, where=str(work), found=f"{free} bytes free", hints=(hint,))
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    where = f"{place.tb_frame.f_code.co_filename}:{place.tb_lineno}" if place is not None else None
    return StepFailedError(
        f"step '{planned.step_id}' failed: {type(error).__name__}: {error}",
        where=where,
        hints=(f"steps logs {run_id}   # has the traceback",),
    )
