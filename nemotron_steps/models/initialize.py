"""A new, randomly initialised checkpoint: config.json, weights and tokenizer in the Hugging Face layout."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemotron_steps.config.families import NAMES
from nemotron_steps.errors import ArtifactError

if TYPE_CHECKING:
    import torch

    from nemotron_steps.config.schema.sft import FromScratchConfig

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.jinja", "generation_config.json"),
)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy every tokenizer and chat template file there is. ArtifactError when there is no tokenizer.json."""
    if not (source / "tokenizer.json").is_file():
        raise ArtifactError("no tokenizer.json", where=str(source), expected="a tokenizer folder")
    target.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def as_umask_says(path: Path) -> None:
    """Give a file the permissions that any new file has: safetensors lets its owner alone read it."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def initialize_checkpoint(shape: FromScratchConfig, tokenizer: Path, target: Path, seed: int) -> None:
    """Write a random float32 model of the given shape, drawn as transformers draws it, whose vocabulary is the
    tokenizer's. `target`: a folder that does not exist yet; it appears whole."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]  # a run draws its own
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    copy_tokenizer(tokenizer, partial)
    words = AutoTokenizer.from_pretrained(str(partial))
    config = AutoConfig.for_model(
        shape.architecture,
        vocab_size=len(words),
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
        **_settings(shape),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
        prediction = _prediction_tensors(config) if shape.hybrid and shape.hybrid.num_nextn_predict_layers else {}
    model.save_pretrained(str(partial))
    copy_tokenizer(tokenizer, partial)  # its generation_config.json, which the model has written its own over
    if prediction:
        weights = str(partial / "model.safetensors")
        save_file({**load_file(weights), **prediction}, weights, metadata={"format": "pt"})
    for path in partial.glob("*.safetensors"):
        as_umask_says(path)
    partial.rename(target)


def _settings(shape: FromScratchConfig) -> dict[str, Any]:
    """Of transformers' config of this family."""
    own = {key: value for key, value in shape.model_dump().items() if key not in ("architecture", "hybrid")}
    if shape.hybrid is None:
        return own
    for key in ("num_hidden_layers", "rope_theta"):
        del own[key]
    hybrid = shape.hybrid.model_dump()
    layers = [NAMES[letter][0] for letter in hybrid.pop("pattern")]
    return {**own, **hybrid, "tie_word_embeddings": False, "layers_block_type": layers}


def _prediction_tensors(config: Any) -> dict[str, torch.Tensor]:
    """A block of multi-token prediction under the hub's names: its layers, and what leads in and out. transformers has
    no module for it; its layers are those of the model."""
    import copy

    import torch
    from transformers import AutoModelForCausalLM

    own = copy.deepcopy(config)
    own.layers_block_type = list(config.mtp_layers_block_type)
    layers = AutoModelForCausalLM.from_config(own, dtype=torch.float32).model.layers.state_dict()  # type: ignore[no-untyped-call]
    tensors = {}
    for name, tensor in layers.items():
        stem, _, kind = name.rpartition(".")
        if stem.endswith(".experts"):  # fused in memory, not in files
            tensors.update({f"{stem}.{number}.{kind}.weight": expert for number, expert in enumerate(tensor)})
        else:
            tensors[name] = tensor
    hidden, last = config.hidden_size, len(own.layers_block_type) - 1
    projection = torch.empty(hidden, 2 * hidden).normal_(std=config.initializer_range)
    tensors |= {"0.eh_proj.weight": projection, f"{last}.final_layernorm.weight": torch.ones(hidden)}
    tensors |= {f"0.{norm}.weight": torch.ones(hidden) for norm in ("enorm", "hnorm")}
    return {f"mtp.layers.{name}": tensor.contiguous() for name, tensor in tensors.items()}
