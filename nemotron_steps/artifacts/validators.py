"""What makes a folder a valid artifact of its type, and the attributes that can be read from its files.

Types without a validator of their own use their nearest supertype's, and at last only have to hold a file.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nemotron_steps.artifacts.checkpoints import (
    listing,
    read_json_object,
    read_safetensors_header,
    validate_hf,
    validate_megatron,
)
from nemotron_steps.artifacts.files import link_root
from nemotron_steps.errors import ArtifactError, StepsError, UnsupportedError
from nemotron_steps.errors.plugins import load_object
from nemotron_steps.rows import layouts, lines

Validator = Callable[[Path], dict[str, Any]]
_ADAPTER, _ADAPTER_WEIGHTS, _ADAPTER_BASE = "adapter_config.json", "adapter_model.safetensors", "base.json"


def validate(type_name: str, folder: Path, supertypes: Sequence[str] = ()) -> dict[str, Any]:
    """Check a folder, or a single JSON Lines file, as an artifact of `type_name` and return the attributes read from
    it."""
    for name in (type_name, *supertypes):
        if name in _VALIDATORS:
            return _VALIDATORS[name](folder)
        if name in _DECLARED:
            return _declared(name, folder)
    if folder.is_dir() and not any(path.is_file() for path in folder.rglob("*")):
        raise ArtifactError("the output is empty", where=str(folder), expected="at least one file")
    return {}


def declare(validators: Mapping[str, str]) -> None:
    """Say which functions validate the types of third-party packs: type → `module:function`, imported when it is
    needed."""
    _DECLARED.update(validators)


def has_validator(type_name: str) -> bool:
    """Whether a type is a built-in one with a validator of its own."""
    return type_name in _VALIDATORS


def _declared(type_name: str, folder: Path) -> dict[str, Any]:
    """What the validator of a third-party type says. One that is not there, or raises what has no code, is named."""
    reference, who = _DECLARED[type_name], f"the validator of type '{type_name}'"
    try:
        validator: Validator = load_object(reference)
    except (ImportError, AttributeError) as error:
        where, hints = getattr(error, "line", None) or reference, ("steps types   # names the file that declares it",)
        raise UnsupportedError(f"{who} cannot be imported: {error}", where=where, hints=hints) from error
    try:
        found = validator(folder)
    except StepsError:
        raise
    except Exception as error:
        what, where = f"{who} failed: {type(error).__name__}: {error}", f"{folder}, by {reference}"
        expected = "an ArtifactError or a DataError for a folder that is not such an artifact"
        raise ArtifactError(what, where=where, expected=expected) from error
    if not isinstance(found, dict):
        kind = type(found).__name__
        raise ArtifactError(f"{who} gives no attributes", where=reference, expected="a dict", found=kind)
    return found


def sniff_type(path: Path) -> str | None:
    """The type of a user-supplied file or folder by its contents, or None if it looks like nothing known."""
    if path.is_file():
        return _sniff_jsonl([path]) if path.suffix == ".jsonl" else None
    if not path.is_dir():
        return None
    if (path / "hf").is_dir() and (path / "weights").is_dir():
        return "checkpoint_megatron"
    if (path / _ADAPTER).is_file():
        return "adapter"  # PEFT leaves the tokenizer, and some tools config.json, beside it
    if (path / "config.json").is_file():
        return "checkpoint_hf"
    files = jsonl_files(path)
    if files:
        return _sniff_jsonl(files)
    return "eval_report" if (path / "report.json").is_file() else None


def jsonl_files(folder: Path) -> list[Path]:
    """Every JSON Lines file of an artifact folder, at any depth, sorted, without links that lead out; a file stands for
    itself."""
    if folder.is_file():
        return [folder]
    inside = os.path.realpath(link_root(folder)).rstrip(os.sep) + os.sep
    found = (path for path in folder.rglob("*.jsonl") if path.is_file())
    return sorted(path for path in found if not path.is_symlink() or os.path.realpath(path).startswith(inside))


def _sniff_jsonl(files: Sequence[Path]) -> str:
    first = next((row for file in files for _, row in lines.read_rows(file)), None)
    return "training_jsonl" if first is None else layouts.sniff_row(first)


def _row_validator(check: lines.RowCheck) -> Validator:
    def validator(folder: Path) -> dict[str, Any]:
        files = jsonl_files(folder)
        if not files:
            what, expected = "the data set has no JSON Lines file", "train.jsonl, and validation.jsonl if there is one"
            raise ArtifactError(what, where=str(folder), expected=expected, found=listing(folder))
        root = folder.parent if folder.is_file() else folder
        counts = {path.relative_to(root).with_suffix("").as_posix(): lines.check_file(path, check) for path in files}
        if not any(counts.values()):
            raise ArtifactError("the data set has no rows", where=str(files[0]), found="0 rows")
        return {"rows": counts}

    return validator


def _rl_prompts(folder: Path) -> dict[str, Any]:
    agents: set[str] = set()

    def check(row: lines.Row, where: str) -> None:
        name = lines.agent_name(row)
        if name:
            agents.add(name)
        layouts.read_request(row, where)

    attributes = _row_validator(check)(folder)
    return {**attributes, "environments": sorted(agents)}


def validate_adapter(folder: Path) -> dict[str, Any]:
    """adapter: PEFT's config, and an A and a B of the same rank for every projection. Returns attributes."""
    config, weights = folder / _ADAPTER, folder / _ADAPTER_WEIGHTS
    for path in (config, weights):
        if not path.is_file():
            pickled = " (pickled weights are not read)" if (folder / "adapter_model.bin").is_file() else ""
            what, found = f"the adapter has no {path.name}{pickled}", listing(folder)
            expected = f"{_ADAPTER} and {_ADAPTER_WEIGHTS}, as PEFT's save_pretrained writes them"
            raise ArtifactError(what, where=str(folder), expected=expected, found=found)
    settings = read_json_object(config)
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float):
        what, expected = "the adapter's config has no rank or no scale", "r: a positive integer, lora_alpha: a number"
        raise ArtifactError(what, where=str(config), expected=expected, found=f"r: {rank}, lora_alpha: {alpha}")
    tensors = read_safetensors_header(weights)
    for name, entry in tensors.items():
        stem, _, half = name.rpartition(".lora_")
        if half not in ("A.weight", "B.weight"):
            raise ArtifactError(
                "the adapter has a tensor that is neither lora_A nor lora_B",
                where=str(weights),
                expected="a plain LoRA adapter",
                found=name,
                hints=("merge it with PEFT's merge_and_unload, and use the checkpoint",),
            )
        shape, other = entry["shape"], "B" if half[0] == "A" else "A"
        if len(shape) != 2 or shape[half[0] == "B"] != rank:
            what, found = f"'{name}' has another rank than the config says", f"shape {shape}"
            raise ArtifactError(what, where=str(weights), expected=str(rank), found=found)
        if f"{stem}.lora_{other}.weight" not in tensors:
            expected = f"lora_{other} beside it"
            raise ArtifactError(f"'{name}' is half of a sum", where=str(weights), expected=expected)
    attributes: dict[str, Any] = {
        "rank": rank,
        "alpha": alpha,
        "target_modules": settings.get("target_modules"),
        "parameters": sum(math.prod(entry["shape"]) for entry in tensors.values()),
        "dtype": "+".join(sorted({entry["dtype"] for entry in tensors.values()})).lower(),
    }
    base = read_json_object(folder / _ADAPTER_BASE) if (folder / _ADAPTER_BASE).is_file() else {}
    return {**attributes, "base": base["digest"]} if base.get("digest") else attributes


def _eval_report(folder: Path) -> dict[str, Any]:
    path = folder / "report.json" if folder.is_dir() else folder
    if not path.is_file():
        raise ArtifactError("the evaluation has no report.json", where=str(folder), expected="report.json")
    report = read_json_object(path)
    metrics = report.get("metrics", report)
    if not isinstance(metrics, dict):
        raise ArtifactError("`metrics` is not an object", where=str(path), expected="name → number")
    numbers = {name: value for name, value in metrics.items() if type(value) in (int, float)}
    bad = [name for name in metrics if name not in numbers]
    if bad and metrics is not report:
        what = f"metric '{bad[0]}' is not a number"
        raise ArtifactError(what, where=str(path), expected="a number", found=repr(metrics[bad[0]]))
    if not numbers:
        raise ArtifactError(
            "the evaluation report has no metrics",
            where=str(path),
            expected="numbers at the top, or an object `metrics`: name → number",
        )
    return {"metrics": numbers}


_DECLARED: dict[str, str] = {}
_VALIDATORS: dict[str, Validator] = {
    "checkpoint_hf": validate_hf,
    "checkpoint_megatron": validate_megatron,
    "adapter": validate_adapter,
    "rl_prompts": _rl_prompts,
    "sft_chats": _row_validator(layouts.read_chat),
    "packed_chats": _row_validator(layouts.check_packed),
    "preference_pairs": _row_validator(layouts.read_pair),
    "training_jsonl": _row_validator(lambda row, where: None),
    "eval_report": _eval_report,
}
