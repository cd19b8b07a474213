"""Checkpoint folders made by hand, without torch: the smallest that are valid."""

import json
import struct
from pathlib import Path
from typing import Any


def write_safetensors(path: Path, tensors: dict[str, list[float]]) -> None:
    header: dict[str, Any] = {}
    data = b""
    for name, values in tensors.items():
        raw = struct.pack(f"<{len(values)}f", *values)
        header[name] = {"dtype": "F32", "shape": [len(values)], "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


def write_model_files(folder: Path, *, hidden_size: int = 8, word: str = "a") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden_size,
        "num_hidden_layers": 2,
        "vocab_size": 16,
        "max_position_embeddings": 64,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps({"padding": None, "model": {"vocab": {word: 0}}}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))


def write_hf(folder: Path, **kwargs: Any) -> Path:
    write_model_files(folder, **kwargs)
    write_safetensors(folder / "model.safetensors", {"a": [1.0, 2.0], "b": [3.0]})
    return folder


def write_megatron(folder: Path, **kwargs: Any) -> Path:
    write_model_files(folder / "hf", **kwargs)
    (folder / "weights").mkdir(parents=True)
    (folder / "weights" / "metadata.json").write_text("{}")
    (folder / "weights" / "__0_0.distcp").write_bytes(b"\0" * 64)
    return folder


def write_adapter(folder: Path) -> Path:
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    shapes = {"A": [2, 4], "B": [4, 2]}
    header = {
        f"base_model.model.model.layers.0.self_attn.q_proj.lora_{letter}.weight": {
            "dtype": "F32",
            "shape": shape,
            "data_offsets": [32 * index, 32 * index + 32],
        }
        for index, (letter, shape) in enumerate(shapes.items())
    }
    encoded = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(encoded)) + encoded + b"\0" * 64)
    return folder
