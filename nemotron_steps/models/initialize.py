"""A new, randomly initialised checkpoint: config.json, weights and tokenizer in the Hugging Face layout."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemotron_steps.errors import ArtifactError

if TYPE_CHECKING:
    from nemotron_steps.config.schema.sft import FromScratchConfig

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
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
    """Write a random float32 model of the given shape whose vocabulary is the tokenizer's.

    Weights are drawn as transformers draws them (normal, std `initializer_range`).
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]  # a run draws its own
    copy_tokenizer(tokenizer, target)
    words = AutoTokenizer.from_pretrained(str(target))
    settings: dict[str, Any] = {k: v for k, v in shape.model_dump().items() if k != "architecture"}
    config = AutoConfig.for_model(
        shape.architecture,
        vocab_size=len(words),
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
        **settings,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    model.save_pretrained(str(target))
    for path in target.glob("*.safetensors"):
        as_umask_says(path)
