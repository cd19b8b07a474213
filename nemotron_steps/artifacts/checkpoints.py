"""Checks of checkpoint folders without torch: required files, safetensors headers, attributes from config.json."""

import hashlib
import json
import math
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from nemotron_steps.artifacts.chat_templates import chat_template, renderer, roles_written, writes_tools
from nemotron_steps.artifacts.files import require_relative
from nemotron_steps.config.families import LARGEST, bounds_time_steps, pattern_of, rope_type, time_step_limit
from nemotron_steps.config.turn_ends import TurnEnds, generation_ends
from nemotron_steps.errors import ArtifactError, fetch_again

_MAX_HEADER_BYTES = 100_000_000
_DTYPE_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""What families call the number of experts of a layer."""
_SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    *("intermediate_size", "moe_intermediate_size"),
)
_SHAPE = (
    *("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("attention_head_dim", "intermediate_size", "vocab_size", "tie_word_embeddings", *_EXPERTS),
    *("num_experts_per_tok", "moe_intermediate_size", "moe_shared_expert_intermediate_size", "moe_latent_size"),
    *("hybrid_override_pattern", "layers_block_type", "num_nextn_predict_layers"),
    *("mtp_hybrid_override_pattern", "mtp_layers_block_type", "mamba_num_heads", "mamba_head_dim"),
    *("ssm_state_size", "n_groups", "mamba_n_groups", "conv_kernel", "mamba_d_conv"),
    *("chunk_size", "mamba_chunk_size"),
)
"""Keys of config.json that the memory of a model depends on."""
_MTP = "mtp."
"""What names of tensors of multi-token prediction begin with."""
_MODELOPT = "hf_quant_config.json"
"""Where ModelOpt says how it quantised a checkpoint; not every config.json repeats it."""
_PLAIN_TOKENIZERS = ("PreTrainedTokenizerFast", "PreTrainedTokenizer", "TokenizersBackend")
"""Classes of tokenizers without special tokens but those that their files name."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


def read_safetensors_header(path: Path) -> dict[str, dict[str, Any]]:
    """Tensor name → {dtype, shape, data_offsets} of one file. ArtifactError if it is malformed or does not fit."""
    if path.is_dir():
        raise _broken(path, "a file", "a folder")
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise _broken(path, "at least 8 bytes", f"{size} bytes")
        (length,) = struct.unpack("<Q", prefix)
        if length > _MAX_HEADER_BYTES or 8 + length > size:
            raise _broken(path, f"a header of at most {size - 8} bytes", f"a header length of {length}")
        raw = file.read(length)
    try:
        header = json.loads(raw)
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = 0
        for name, entry in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
            start, stop = entry["data_offsets"]
            bits = _DTYPE_BITS.get(entry["dtype"])
            count = math.prod(entry["shape"])
            if start != end or (bits is not None and (stop - start) * 8 != count * bits):
                raise _broken(path, f"tensor '{name}' at byte {end} with {count} values", f"bytes {start} to {stop}")
            end = stop
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ArtifactError):
            raise
        raise _broken(path, "a JSON header of tensors", repr(error)) from error
    if 8 + length + end != size:
        raise _broken(path, f"{8 + length + end} bytes", f"{size} bytes")
    return tensors


def has_weights(folder: Path) -> bool:
    """Whether a model folder has any safetensors file, or an index of some."""
    return any(folder.glob("*.safetensors*"))


def validate_hf(folder: Path) -> dict[str, Any]:
    """checkpoint_hf: config.json, tokenizer and complete safetensors weights. Returns attributes."""
    attributes = validate_model_folder(folder)
    entries = [each for shard in safetensors_shards(folder) for each in read_safetensors_header(shard).items()]
    names = {name for name, _ in entries}
    if attributes.get("mtp_layers") and not any(name.startswith(_MTP) for name in names):
        attributes["mtp_layers"] = 0  # whoever saved it last had no place for them, and config.json still claims them
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        missing = sorted(set(read_json_object(index).get("weight_map", {})) - names)
        if missing:
            what, found = "the checkpoint's index names tensors that no shard holds", f"{len(missing)} missing"
            raise ArtifactError(what, where=str(index), expected=missing[0], found=found, hints=fetch_again(folder))
    dtypes = sorted({entry["dtype"] for _, entry in entries})
    parameters = sum(math.prod(entry["shape"]) for _, entry in entries)
    return {**attributes, "parameters": parameters, "dtype": "+".join(dtypes).lower()}


def validate_megatron(folder: Path) -> dict[str, Any]:
    """checkpoint_megatron: `hf/` (config.json, tokenizer) and `weights/` (distributed checkpoint)."""
    for part in ("hf", "weights"):
        if not (folder / part).is_dir():
            convert = f"steps run convert/hf_to_megatron --input checkpoint_hf={folder}"
            raise ArtifactError(
                f"a Megatron checkpoint needs a '{part}' folder",
                where=str(folder),
                expected="hf/ (config.json and tokenizer) and weights/ (distributed checkpoint)",
                found=listing(folder),
                hints=(convert,) if (folder / "config.json").is_file() else (),
            )
    attributes = validate_model_folder(folder / "hf")
    files = [path for path in (folder / "weights").rglob("*") if path.is_file()]
    if not files:
        raise ArtifactError("the checkpoint has no weights", where=str(folder / "weights"), found="an empty folder")
    empty = sorted(path for path in files if path.suffix in (".distcp", ".safetensors") and not path.stat().st_size)
    if empty:
        raise ArtifactError("a weights file is empty", where=str(empty[0]), found="0 bytes")
    for path in files:
        if path.suffix == ".safetensors":
            read_safetensors_header(path)
        elif path.suffix == ".json":
            read_json_object(path)
    # Tensors of multi-token prediction, carried or trained. The list of what was trained is a pickle, which is not
    # opened here; names are plain text in it.
    stored = folder / "weights" / ".metadata"
    carried = (folder / "hf" / "carried.safetensors").is_file()
    if not carried and stored.is_file() and _MTP.encode() not in stored.read_bytes() and attributes.get("mtp_layers"):
        attributes["mtp_layers"] = 0
    return attributes


def validate_model_folder(folder: Path) -> dict[str, Any]:
    """config.json and tokenizer of a model folder → attributes: what later steps must agree on, where it is known."""
    config_path = folder / "config.json"
    if not config_path.is_file():
        what, found = "the checkpoint has no config.json", listing(folder)
        raise ArtifactError(what, where=str(folder), expected="config.json", found=found)
    config = read_json_object(config_path, fetch_again(folder, config_path))
    nested = config.get("text_config")
    text = nested if isinstance(nested, dict) else config
    attributes: dict[str, Any] = {}
    architectures = config.get("architectures")
    if isinstance(architectures, list) and architectures:
        attributes["architecture"] = architectures[0]
    if "model_type" in config:
        attributes["model_type"] = config["model_type"]
    attributes |= {key: text[key] for key in _SIZES if type(text.get(key)) is int}
    pattern = pattern_of(text)
    if pattern:
        attributes.update(_hybrid_attributes(pattern, text))
    experts = next((text[key] for key in _EXPERTS if type(text.get(key)) is int), None)
    if experts is not None and (not pattern or "E" in pattern):
        attributes["num_experts"] = experts
    attributes["shape"] = {key: text[key] for key in _SHAPE if isinstance(text.get(key), int | str | list)}
    if type(text.get("max_position_embeddings")) is int:
        attributes["sequence_length"] = _positions(text)
    rope, fixed = rope_type(text)
    attributes |= {"rope_type": rope} if rope != "default" else {}
    attributes |= {"fixed_positions": fixed} if fixed is not None else {}
    attributes["tokenizer"] = tokenizer_digest(folder)
    if (folder / "tokenizer.json").is_file():
        content = read_json_object(folder / "tokenizer.json", fetch_again(folder, folder / "tokenizer.json"))
        model, added = content.get("model"), content.get("added_tokens")
        vocabulary = model.get("vocab") if isinstance(model, dict) else None
        ids = [number for number in vocabulary.values() if type(number) is int] if isinstance(vocabulary, dict) else []
        ids += [token["id"] for token in added or () if isinstance(token, dict) and type(token.get("id")) is int]
        if isinstance(vocabulary, dict | list):
            attributes["tokenizer_size"] = max([*ids, len(vocabulary) - 1]) + 1
    template, digest = chat_template(folder), chat_template_digest(folder)
    attributes |= {"chat_template": digest} if digest is not None else {}
    if template is not None and digest is not None:
        attributes |= {"chat_roles": list(roles_written(template)), "chat_tools": writes_tools(template)}
    ends = _turn_ends(folder)
    if ends is not None:
        attributes |= {"has_end_token": bool(ends), "turn_ends": ends}
    quantisation = config.get("quantization_config")
    if quantisation:
        method = quantisation.get("quant_method") if isinstance(quantisation, dict) else None
        attributes["quantised"] = str(method or "unnamed")
    elif (folder / _MODELOPT).is_file():
        attributes["quantised"] = f"modelopt ({_MODELOPT})"
    return attributes


def _hybrid_attributes(pattern: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Of a model whose layers are of several kinds, a letter each."""
    found: dict[str, Any] = {
        "num_hidden_layers": len(pattern),
        "head_dim": config.get("head_dim", config.get("attention_head_dim")),
        "mtp_layers": config.get("num_nextn_predict_layers") or 0,
    }
    if "M" in pattern:
        groups = config.get("n_groups", config.get("mamba_n_groups"))
        found |= {"mamba_num_heads": config.get("mamba_num_heads"), "mamba_groups": groups}
        with suppress(KeyError, TypeError, ValueError, OverflowError):  # whoever loads it reports that
            found |= {"bounded_time_steps": True} if bounds_time_steps(time_step_limit(config)) else {}
    if "E" in pattern:
        shared, dense = config.get("moe_shared_expert_intermediate_size"), config.get("intermediate_size")
        if isinstance(shared, int) and isinstance(dense, int):
            found["shared_expert_width"] = math.gcd(shared, dense) if "-" in pattern else shared
    return {name: value for name, value in found.items() if isinstance(value, int)}


def _positions(config: Mapping[str, Any]) -> int:
    """Longest sequence that a model's position embedding was made for, scaling included as far as that can be."""
    stated = int(config["max_position_embeddings"])
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping) or (scaling.get("rope_type") or scaling.get("type")) not in ("yarn", "linear"):
        return stated
    original, factor = scaling.get("original_max_position_embeddings") or stated, scaling.get("factor") or 1.0
    if not all(type(number) in (int, float) and 0 < number <= LARGEST for number in (original, factor)):
        return stated  # whoever loads it reports that
    return max(stated, int(original * factor))


def tokenizer_digest(folder: Path) -> str:
    """A digest of what the tokenizer does, so that a re-saved copy of it has the same one: of tokenizer.json without
    padding and truncation, which change with the last call. ArtifactError if the folder has no tokenizer."""
    path = next((folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()), None)
    if path is None:
        expected, hints = " or ".join(_TOKENIZER_FILES[:2]), (f"cp <base model folder>/tokenizer*.json {folder}/",)
        what, found = "the checkpoint has no tokenizer", listing(folder)
        raise ArtifactError(what, where=str(folder), expected=expected, found=found, hints=hints)
    data = path.read_bytes()
    if path.name == "tokenizer.json":
        content = read_json_object(path, fetch_again(folder, path))
        kept = {name: value for name, value in content.items() if name not in ("padding", "truncation")}
        data = json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()
    return "sha256:" + hashlib.sha256(data).hexdigest()[:16]


def _turn_ends(folder: Path) -> list[str] | None:
    """Texts of the tokens that end an assistant's turn (config/turn_ends.py), the tokenizer's own first; none where it
    names one that it does not have. None where that cannot be told here."""
    tokenizer, settings = folder / "tokenizer.json", folder / "tokenizer_config.json"
    if not tokenizer.is_file() or not settings.is_file():
        return None
    config, content = read_json_object(settings), read_json_object(tokenizer)
    named = config.get("eos_token")
    if named is None and (folder / "special_tokens_map.json").is_file():
        named = read_json_object(folder / "special_tokens_map.json").get("eos_token")
    text = named.get("content") if isinstance(named, dict) else named
    model, later = content.get("model"), config.get("added_tokens_decoder")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):  # of unigrams, each with its score
        vocabulary = {entry[0]: number for number, entry in enumerate(vocabulary) if isinstance(entry, list) and entry}
    added = {token.get("id"): token for token in content.get("added_tokens") or () if isinstance(token, dict)}
    later = later.items() if isinstance(later, dict) else ()
    added |= {int(number): token for number, token in later if number.isdigit() and isinstance(token, dict)}
    vocabulary = vocabulary if isinstance(vocabulary, dict) else None
    text_of = {number: word for word, number in (vocabulary or {}).items()}
    text_of |= {number: str(token.get("content")) for number, token in added.items()}
    own = [text] if isinstance(text, str) else []
    if own and vocabulary is not None and text not in text_of.values():
        return []  # transformers would make a new token of it, which the model does not know
    ends = [*own, *(text_of[number] for number in generation_ends(folder) if number in text_of)]
    render = renderer(chat_template(folder) or "", "".join(own))
    if render is not None:
        special = {text_of[number] for number, token in added.items() if token.get("special")}
        tokens = {text_of[number] for number in added}
        ends += TurnEnds(render, tokens.intersection(ends), special, tokens).written
    # Classes of a family have end tokens of their own.
    known = bool(ends) or config.get("tokenizer_class") in _PLAIN_TOKENIZERS
    return list(dict.fromkeys(ends)) if known and (vocabulary is not None or not own) else None


def chat_template_digest(folder: Path) -> str | None:
    """A digest of the chat template, from chat_template.jinja or tokenizer_config.json; None without one."""
    path, template = folder / "chat_template.jinja", None
    if path.is_file():
        template = path.read_text(encoding="utf-8")
    elif (folder / "tokenizer_config.json").is_file():
        template = read_json_object(folder / "tokenizer_config.json").get("chat_template")
    if not template:
        return None
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return "sha256:" + hashlib.sha256(text.strip().encode()).hexdigest()[:16]


def read_json_object(path: Path, hints: Sequence[str] = ()) -> dict[str, Any]:
    """A JSON object from a file; ArtifactError naming file and line if it is anything else."""
    try:
        data = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        what, where = "the file is not JSON", f"{path}:{getattr(error, 'lineno', 1)}"
        raise ArtifactError(what, where=where, expected="a JSON object", found=str(error), hints=hints) from error
    if not isinstance(data, dict):
        what, found = "the file is not a JSON object", type(data).__name__
        raise ArtifactError(what, where=str(path), expected="a JSON object", found=found, hints=hints)
    return data


def safetensors_shards(folder: Path) -> list[Path]:
    """The weights files of a model folder: those of its index, else all. ArtifactError for none, or one missing."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json_object(index).get("weight_map", {})
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            what, expected = "the checkpoint's index is malformed", "weight_map: tensor → file name"
            raise ArtifactError(what, where=str(index), expected=expected)
        names = [require_relative(name, str(index)) for name in sorted(set(weight_map.values()))]
        missing = [name for name in names if not (folder / name).is_file()]
        if missing or not names:
            raise ArtifactError(
                "the checkpoint's index names shards that are not there",
                where=str(index),
                expected=missing[0] if missing else "at least one shard",
                found=listing(folder),
                hints=fetch_again(folder),
            )
        return [folder / name for name in names]
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
        raise ArtifactError(
            "the checkpoint has no safetensors weights" + (" (pickled weights are not read)" if pickled else ""),
            where=str(folder),
            expected="model.safetensors, or shards with model.safetensors.index.json",
            found=listing(folder),
            hints=fetch_again(folder),
        )
    return shards


def _broken(path: Path, expected: str, found: str) -> ArtifactError:
    what, hints = "the safetensors file is broken or cut off", fetch_again(path.parent, path)
    return ArtifactError(what, where=str(path), expected=expected, found=found, hints=hints)


def listing(folder: Path) -> str:
    """What is in a folder, for errors; of a file that was given for one, that it is a file."""
    if not folder.is_dir():
        return "a file"
    names = sorted(path.name for path in folder.iterdir())
    return (", ".join(names[:8]) + (", …" if len(names) > 8 else "")) or "an empty folder"
