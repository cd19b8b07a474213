"""Hugging Face checkpoint folders: config.json, safetensors weights, tokenizer and chat template. Weights are only ever
read from safetensors, never from pickled `.bin` files. Not for: conversion (mapping.py)."""

from __future__ import annotations

import json
import shlex
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemotron_steps.config.families import FAMILIES
from nemotron_steps.errors import ArtifactError, fetch_again
from nemotron_steps.models.architecture import read_config
from nemotron_steps.models.families import module_of
from nemotron_steps.models.initialize import as_umask_says, copy_tokenizer
from nemotron_steps.models.mapping import HEAD, in_precision

if TYPE_CHECKING:
    import torch

EMBEDDING = "model.embed_tokens.weight"
_INDEX = "model.safetensors.index.json"
CARRIED = "carried.safetensors"
"""Of a Megatron checkpoint's `hf` folder; see `carried_tensors`."""
MAX_SHARD_BYTES = 5_000_000_000


class WeightReader:
    """Reads the tensors of a safetensors checkpoint by name, opening each shard once. Those that models make of others,
    a tied output layer or rotary frequencies, are not among them. ArtifactError when the folder has no safetensors
    weights, or another output layer."""

    def __init__(self, folder: str | Path) -> None:
        import torch
        from safetensors import SafetensorError, safe_open

        self.folder = Path(folder)
        index = self.folder / _INDEX
        found = sorted(path.name for path in self.folder.glob("*"))
        files = [name for name in found if name.endswith(".safetensors")]
        if index.is_file():
            files = _indexed_shards(index)
        elif "model.safetensors" in files:
            files = ["model.safetensors"]
        if not files:
            raise ArtifactError(
                "the checkpoint has no safetensors weights",
                where=str(self.folder),
                expected="model.safetensors",
                found=", ".join(found[:8]) or "nothing",
                hints=fetch_again(self.folder),
            )
        self._handles: dict[str, Any] = {}
        file_of: dict[str, str] = {}
        for name in files:
            try:
                handle: Any = safe_open(str(self.folder / name), framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise ArtifactError(
                    "a weights file cannot be read",
                    where=str(self.folder / name),
                    found=str(error),
                    hints=fetch_again(self.folder, self.folder / name),
                ) from error
            for key in list(handle.keys()):
                if file_of.setdefault(key, name) != name:
                    raise in_two_files(key, self.folder, file_of[key], name)
                self._handles[key] = handle
        for key in [key for key in self._handles if key.endswith("rotary_emb.inv_freq")]:
            del self._handles[key]
        path = self.folder / "config.json"
        config = read_config(path) if path.is_file() else {}  # an adapter has none
        if self._handles.keys() >= {HEAD, EMBEDDING} and config.get("tie_word_embeddings") is True:
            if not torch.equal(self(HEAD).float(), self(EMBEDDING).float()):
                raise two_for_one(path)
            del self._handles[HEAD]

    def names(self) -> set[str]:
        """Of every tensor in the checkpoint."""
        return set(self._handles)

    def __call__(self, name: str) -> torch.Tensor:
        """One tensor. KeyError if there is none of that name."""
        tensor: torch.Tensor = self._handles[name].get_tensor(name)
        return tensor


def two_for_one(config: Path) -> ArtifactError:
    """The refusal of weights with an output layer of their own where config.json says that there is none: transformers
    would use it, vLLM would not."""
    edited = 's/"tie_word_embeddings": *true/"tie_word_embeddings": false/'
    return ArtifactError(
        f"config.json says tie_word_embeddings: true, but {HEAD} and {EMBEDDING} differ",
        where=str(config),
        expected="tie_word_embeddings: false where the output layer has weights of its own",
        found="true",
        hints=(f"sed -i '{edited}' {shlex.quote(str(config))}   # uses both, as transformers does",),
    )


def in_two_files(name: str, folder: Path, first: str, second: str) -> ArtifactError:
    """The refusal of a tensor that two weights files have: even with an index, who loads them takes either."""
    one, other = (shlex.quote(str(folder / file)) for file in (first, second))
    what, found = f"two weights files have the tensor {name}", f"{first} and {second}"
    hints = [f"mv {other} {other}.unused   # leaves that of {first}", f"mv {one} {one}.unused   # or of {second}"]
    return ArtifactError(what, where=str(folder), expected="every tensor in one file", found=found, hints=hints)


class FiniteReader(WeightReader):
    """A WeightReader that refuses NaN and infinite weights: what is made of them is as broken, and does not say so."""

    def __call__(self, name: str) -> torch.Tensor:
        """One tensor; ArtifactError if it has values that are NaN or infinite."""
        return require_finite(name, super().__call__(name), self.folder)


def require_finite(name: str, tensor: torch.Tensor, place: Path) -> torch.Tensor:
    """`tensor` if all its numbers are finite. ArtifactError naming it and the checkpoint at `place` otherwise."""
    import torch

    if not tensor.is_floating_point():
        return tensor
    # Eight-bit types have no test of their own.
    numbers = tensor.float() if tensor.element_size() == 1 else tensor
    if not bool(torch.isfinite(numbers).all()):
        broken = int((~torch.isfinite(numbers)).sum())
        raise ArtifactError(
            f"weight '{name}' has values that are NaN or infinite",
            where=str(place),
            expected="finite numbers",
            found=f"{broken} of {tensor.numel()} are not",
            hints=("take an earlier checkpoint, from before the training diverged",),
        )
    return tensor


def _indexed_shards(index: Path) -> list[str]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        outside = [name for name in names if name.startswith("/") or ".." in name.split("/")]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError("the checkpoint's index is malformed", where=str(index), found=repr(error)) from error
    if outside:
        raise ArtifactError(
            "the checkpoint's index names a shard outside its folder",
            where=str(index),
            expected="files of the checkpoint",
            found=outside[0],
        )
    return names


def load_hf_weights(folder: str | Path) -> dict[str, torch.Tensor]:
    """Every tensor of a Hugging Face checkpoint on CPU, in the type it was saved in."""
    reader = WeightReader(folder)
    return {name: reader(name) for name in sorted(reader.names())}


def save_hf_checkpoint(target: str | Path, weights: Iterable[tuple[str, torch.Tensor]], source: str | Path) -> None:
    """Write a Hugging Face checkpoint: the weights in shards of at most 5 GB, each in its own type, and config.json,
    tokenizer and carried tensors of `source`. Files of the same name are replaced."""
    target, source = Path(target), Path(source)
    target.mkdir(parents=True, exist_ok=True)
    _copy_files(source, target)

    def whole() -> Iterator[tuple[str, torch.Tensor]]:
        written = set()
        for name, tensor in weights:
            written.add(name)
            yield name, tensor
        yield from (each for each in carried_tensors(source) if each[0] not in written)

    shard_of, total, numbers = _write_shards(target, whole())
    if numbers:
        # Of most of them: a few tensors stay float32 in models that are not.
        dtype, config = str(numbers.most_common(1)[0][0]).removeprefix("torch."), read_config(target / "config.json")
        if config.get("dtype", config.get("torch_dtype")) != dtype:
            config.pop("torch_dtype", None)
            text = json.dumps({**config, "dtype": dtype}, indent=2, sort_keys=True)
            (target / "config.json").write_text(text + "\n", encoding="utf-8")
    count = 1 + max(shard_of.values(), default=0)
    files = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    if count == 1:
        files = ["model.safetensors"]
    for number, file in enumerate(files):
        (target / f"shard-{number}.writing").rename(target / file)
    if count == 1:
        return
    weight_map = {name: files[number] for name, number in shard_of.items()}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (target / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True), encoding="utf-8")


def copy_model_files(source: Path, target: Path, *, carries: bool = True, precision: str = "keep") -> None:
    """Copy what a Megatron checkpoint has beside its weights: config.json, the tokenizer's files and, with `carries`,
    carried tensors, those of a Hugging Face folder in `precision` (mapping.in_precision)."""
    from safetensors.torch import save_file

    _copy_files(source, target)
    if not carries:
        return
    if (source / CARRIED).is_file():
        shutil.copyfile(source / CARRIED, target / CARRIED)
        return
    carried = {name: in_precision(name, tensor, precision) for name, tensor in carried_tensors(source)}
    if carried:
        save_file(carried, str(target / CARRIED), metadata={"format": "pt"})
        as_umask_says(target / CARRIED)


def carried_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that a policy has only if it trains them, those of multi-token prediction, in the type they are saved in.
    In a Hugging Face checkpoint they are among the weights; a Megatron checkpoint's `hf` has a file of them, unless
    they were trained: then they are among the weights beside it."""
    family = FAMILIES.get(str(read_config(folder / "config.json").get("model_type")))
    prefix = module_of(family.name).CARRIED if family is not None else ""
    if not prefix:
        return
    if folder.name == "hf" and not (folder / CARRIED).is_file():
        from nemotron_steps.models.megatron_checkpoint import is_megatron_checkpoint, trained_mtp

        if is_megatron_checkpoint(folder.parent):  # a hub folder may have that name, too
            yield from trained_mtp(folder.parent)
            return
    if any(folder.glob("*.safetensors")):
        reader = WeightReader(folder)
        for name in sorted(reader.names()):
            if name.startswith(prefix):
                yield name, reader(name)


def _copy_files(source: Path, target: Path) -> None:
    config = read_config(source / "config.json")
    copy_tokenizer(source, target)
    if config.pop("auto_map", None) is None:
        shutil.copyfile(source / "config.json", target / "config.json")
    else:  # it names Python files of the source, which are neither run nor copied
        (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_shards(
    target: Path, weights: Iterable[tuple[str, torch.Tensor]]
) -> tuple[dict[str, int], int, Counter[torch.dtype]]:
    """Each tensor's shard, the bytes of all, and how many numbers there are of each floating type."""
    from safetensors.torch import save_file

    shard_of: dict[str, int] = {}
    numbers: Counter[torch.dtype] = Counter()
    pending: dict[str, torch.Tensor] = {}
    shard = size = total = 0

    def flush() -> None:
        path = target / f"shard-{shard}.writing"
        save_file(pending, str(path), metadata={"format": "pt"})
        as_umask_says(path)
        pending.clear()

    for name, tensor in weights:
        # Views of fused tensors share storage, which safetensors refuses: contiguous copies of each.
        kept = tensor.detach().to(device="cpu", copy=True).contiguous()
        if pending and size + kept.nbytes > MAX_SHARD_BYTES:
            flush()
            shard, size = shard + 1, 0
        pending[name], shard_of[name] = kept, shard
        size += kept.nbytes
        total += kept.nbytes
        if kept.is_floating_point():
            numbers[kept.dtype] += kept.numel()
    flush()
    return shard_of, total, numbers
