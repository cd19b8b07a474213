"""What a user supplies as an input: a path, an artifact of the home, a hub model, or rows of another form.

Only the first bytes and the names of files are looked at.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemotron_steps.errors import ArtifactError, UnknownNameError, did_you_mean
from nemotron_steps.manifest.registry import Registry
from nemotron_steps.resolver.plan import SuppliedInput
from nemotron_steps.resolver.problems import ROWS, AbsentInput

if TYPE_CHECKING:
    from nemotron_steps.artifacts.store import ArtifactStore

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
FOREIGN = {"prompt_data": "rl_prompts", "chat_data": "sft_chats", "pair_data": "preference_pairs"}
"""Types of rows as others have them → what an import makes of them."""


def describe(ref: str, wanted_type: str, store: ArtifactStore, registry: Registry) -> SuppliedInput:
    """What a reference that a user gave is: a path, an artifact of the home, or the name of a hub model. ArtifactError
    if there is no such thing, or nothing of its contents says what it is."""
    path = Path(ref).expanduser()
    if path.exists():
        return _describe_path(path, ref, wanted_type, registry)
    hints: tuple[str, ...] = ("steps artifacts list",)
    if not ref.startswith((".", "/", "~")):
        try:
            artifact = store.find(ref)
            return SuppliedInput(ref, artifact.type, artifact.attributes)
        except (UnknownNameError, ArtifactError) as error:
            if _HUB_NAME.fullmatch(ref) and _is_checkpoint(wanted_type, registry):
                is_hf = registry.types.is_a(wanted_type, "checkpoint_hf")
                return SuppliedInput(ref, None if is_hf else "checkpoint_hf")
            hints = error.hints or hints
    names = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
    near = [ref.removesuffix(path.name) + name for name in get_close_matches(path.name, names, n=1, cutoff=0.75)]
    raise AbsentInput(
        f"'{ref}' is neither a path nor an artifact of this home",
        expected=f"PATH, NAME, NAME:VERSION or a digest of a {wanted_type}",
        found=ref,
        hints=(*did_you_mean(near), *hints),
    )


def _describe_path(path: Path, ref: str, wanted_type: str, registry: Registry) -> SuppliedInput:
    from nemotron_steps.artifacts.checkpoints import has_weights, validate_model_folder
    from nemotron_steps.artifacts.prompt_data import first_row, looks_like
    from nemotron_steps.artifacts.validators import has_validator, sniff_type, validate

    types = registry.types
    ancestors = types.ancestors(wanted_type)
    # Only built-in types are recognised by their content; for any other the user's word counts.
    if not any(has_validator(name) for name in ancestors):
        return SuppliedInput(ref, wanted_type)
    found = sniff_type(path)
    foreign = next((kind for kind, ours in FOREIGN.items() if wanted_type in (kind, ours)), None)
    fits = found is not None and types.is_a(found, FOREIGN.get(foreign or "", wanted_type))
    if foreign is not None and not fits and looks_like(foreign, path):
        return SuppliedInput(ref, foreign, _at_a_glance(path) if foreign == "prompt_data" else {})
    # Rows are read and checked when the step opens them; anything else is cheap to look at now.
    files = [path] if path.is_file() else path.rglob("*.jsonl")
    has_rows = (file.is_file() and file.stat().st_size for file in files)
    if types.is_a(wanted_type, "training_jsonl") and (found is None or not any(has_rows)):
        shape = next((f", rows like {ROWS[name]}" for name in ancestors if name in ROWS), "")
        what, expected = f"'{ref}' has no rows of {wanted_type}", f"JSON Lines: an unpacked file or folder{shape}"
        raise ArtifactError(what, expected=expected, hints=(f"steps types   # what {wanted_type} is",))
    if foreign is not None and found == "training_jsonl":
        raise unknown_rows(ref, wanted_type, first_row(path) or {})
    type_name = found or wanted_type
    if path.is_file() and type_name.startswith("checkpoint"):
        raise ArtifactError(f"'{ref}' is a file, not {wanted_type}", expected="the folder of a checkpoint")
    if found is not None and not type_name.startswith("checkpoint"):
        return SuppliedInput(ref, type_name, _at_a_glance(path) if type_name == "rl_prompts" else {})
    nested = path / "hf"  # of a Megatron checkpoint
    model = str(nested if nested.is_dir() else path) if _is_checkpoint(type_name, registry) else None
    try:
        return SuppliedInput(ref, type_name, validate(type_name, path, types.ancestors(type_name)), folder=model)
    except ArtifactError as error:
        if type_name != "checkpoint_hf" or has_weights(path):
            raise
        said = {"where": error.where, "expected": error.expected, "found": error.found}
        download = f"hf download MODEL --local-dir {shlex.quote(str(path))}   # its weights as well"
        absent = AbsentInput(error.what, hints=(download,), **said)
        return SuppliedInput(ref, type_name, validate_model_folder(path), absent=absent, folder=model)


def _is_checkpoint(type_name: str, registry: Registry) -> bool:
    return any(ancestor.startswith("checkpoint") for ancestor in registry.types.ancestors(type_name))


def _at_a_glance(path: Path) -> dict[str, Any]:
    """Attributes of prompts that their first rows tell: who speaks in them, and that they name nobody who grades."""
    from nemotron_steps.artifacts.prompt_data import names_no_agent, roles_in

    roles = roles_in(path)
    return {**({"roles": list(roles)} if roles else {}), **({"environments": []} if names_no_agent(path) else {})}


def unknown_rows(ref: str, wanted: str, first: Mapping[str, Any]) -> ArtifactError:
    """The error for rows that no import reads: what the first has, and how the column of a prompt is named."""
    texts = [name for name, value in first.items() if isinstance(value, str | list) and value]
    hints = [
        f"steps run data_prep/import_prompts --input dataset={shlex.quote(ref)} prompt_column={name}"
        "   # then --input prompts=data_prep/import_prompts/prompts"
        for name in texts[:2]
        if wanted == "rl_prompts" and re.fullmatch(r"\w[\w.-]*", name)  # needs no quotes
    ]
    return ArtifactError(
        f"no column of '{ref}' is known to hold what {wanted} needs",
        expected=f"rows like {ROWS[wanted]}, or as TRL, verl, OpenAI or ShareGPT have them",
        found=f"fields {', '.join(sorted(first)) or 'none'}",
        hints=hints or (f"steps types   # what {wanted} is",),
    )
