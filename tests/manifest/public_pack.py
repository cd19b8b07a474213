"""A pack in the public Nemotron layout, as large as the public one: 24 steps, nine of them with ids that ours have.

One folder a step with `step.toml` and mostly a `config/` beside it; no manifest but one names an `entry`.
"""

from pathlib import Path

from tests.manifest.packs_on_disk import write_files

SHARED = (
    "convert/hf_to_megatron",
    "convert/megatron_to_hf",
    "data_prep/rl_prep",
    "eval/model_eval",
    "rl/nemo_rl/dpo",
    "rl/nemo_rl/rlhf",
    "rl/nemo_rl/rlvr",
    "sft/automodel",
    "sft/megatron_bridge",
)
"""Ids that the built-in pack has as well."""

_TYPES = """
[training_jsonl]
description = "Chats, one a line"
[filtered_jsonl]
description = "Chats that passed a filter"
is_a = ["training_jsonl"]
[packed_parquet]
description = "Packed token shards"
[checkpoint_megatron]
description = "Sharded checkpoint"
convert_to = { checkpoint_hf = "convert/megatron_to_hf" }
[checkpoint_hf]
description = "Safetensors"
convert_to = { checkpoint_megatron = "convert/hf_to_megatron" }
[checkpoint_lora]
description = "Adapter"
convert_to = { checkpoint_hf = "convert/fold_adapter" }
[eval_results]
description = "Scores"
"""

_PORTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "convert/hf_to_megatron": (("checkpoint_hf",), ("checkpoint_megatron",)),
    "convert/megatron_to_hf": (("checkpoint_megatron",), ("checkpoint_hf",)),
    "data_prep/rl_prep": ((), ("training_jsonl",)),
    "eval/model_eval": (("checkpoint_hf",), ("eval_results",)),
    "rl/nemo_rl/dpo": (("training_jsonl", "checkpoint_megatron"), ("checkpoint_megatron",)),
    "rl/nemo_rl/rlhf": (("training_jsonl", "checkpoint_megatron", "checkpoint_hf"), ("checkpoint_megatron",)),
    "rl/nemo_rl/rlvr": (("training_jsonl", "checkpoint_megatron"), ("checkpoint_megatron",)),
    "sft/automodel": (("training_jsonl", "checkpoint_hf"), ("checkpoint_hf",)),
    "sft/megatron_bridge": (("packed_parquet",), ("checkpoint_megatron",)),
    "convert/fold_adapter": (("checkpoint_lora", "checkpoint_hf"), ("checkpoint_hf",)),
    "curate/filter": (("training_jsonl",), ("filtered_jsonl",)),
    "prep/packing": (("training_jsonl",), ("packed_parquet",)),
    "prep/tokens": (("training_jsonl",), ("binidx",)),
    "pretrain/automodel": (("training_jsonl",), ("checkpoint_hf",)),
    "pretrain/megatron_bridge": (("binidx",), ("checkpoint_megatron",)),
    "peft/automodel": (("training_jsonl",), ("checkpoint_lora",)),
    "peft/megatron_bridge": (("packed_parquet",), ("checkpoint_lora",)),
    "optimize/distill": (("checkpoint_hf",), ("checkpoint_megatron",)),
    "optimize/prune": (("checkpoint_hf",), ("checkpoint_hf",)),
    "optimize/quantize": (("checkpoint_hf",), ("checkpoint_hf",)),
    "synth/designer": ((), ("training_jsonl",)),
    "translate/lines": (("training_jsonl",), ("training_jsonl",)),
    "bench/make": (("own_corpus",), ("own_benchmark",)),
    "env/profiles": ((), ("env_toml",)),
}


def public_pack(root: Path) -> Path:
    """Write the pack below `root`; returns its folder, `root/public`."""
    files = {"types.toml": _TYPES}
    for step_id, (consumes, produces) in _PORTS.items():
        text = f'[step]\nid = "{step_id}"\nname = "Public {step_id}"\ncategory = "{step_id.split("/")[0]}"\n'
        text += f'description = "The public one of {step_id}."\n'
        text += "".join(f'[[consumes]]\ntype = "{name}"\n' for name in consumes)
        text += "".join(f'[[produces]]\ntype = "{name}"\n' for name in produces)
        files[f"{step_id}/step.toml"] = text + '[[strategies]]\nwhen = "it is slow"\nthen = "wait"\n'
    # What the configs of other tools look like: their own defaults syntax, resolvers and variables.
    files["sft/megatron_bridge/config/default.yaml"] = "mounts:\n- ${auto_mount:somewhere}\nsave: ${oc.env:NOT_SET}/x\n"
    files["rl/nemo_rl/rlhf/config/default.yaml"] = "grpo: {num_generations_per_prompt: 8}\n"
    files["rl/nemo_rl/rlhf/config/tiny.yaml"] = "defaults: default.yaml\ngrpo: {max_num_steps: 5}\n"
    files["curate/filter/config/default.yaml"] = "threads: 4\n"
    # Files that are no manifests.
    files["bench/make/pyproject.toml"] = "[project]\nname = 'x'\n"
    files["bench/make/data/langpack.toml"] = "[pack]\nlanguage = 'en'\n"
    return write_files(root / "public", files)
