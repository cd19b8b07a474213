"""What the steps that read a model refuse before any step of a run starts. Manifests name these as `preflight`; every
`check_*` takes the config and the inputs (see StepTable.preflight). Nothing here may import torch."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from nemotron_steps.artifacts.checkpoints import read_safetensors_header, safetensors_shards
from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.config.families import FAMILIES
from nemotron_steps.config.layout.constraints import raise_if_ray_needed, raise_if_violated, violations
from nemotron_steps.config.layout.model_limits import limit_violations, vllm_keys, vllm_violations
from nemotron_steps.config.layout.model_spec import ModelSpec
from nemotron_steps.config.layout.parallel_config import JUDGES, getter, parallel_config_of
from nemotron_steps.config.schema.base import Section
from nemotron_steps.config.schema.convert import ConvertConfig, MergeConfig
from nemotron_steps.config.schema.dpo import DpoConfig
from nemotron_steps.config.schema.eval import DifficultyConfig, EvalConfig, StagesEvalConfig
from nemotron_steps.config.schema.opd import OpdConfig
from nemotron_steps.config.schema.rl import JUDGE_ROLES, RlConfig
from nemotron_steps.config.schema.sft import GenRmConfig, SftConfig
from nemotron_steps.engine.setup.rows import (
    check_run_rows,
    prompt_stream,
    read_data,
    teacher_choice,
    validation_keys,
)
from nemotron_steps.environments.custom_reward import load
from nemotron_steps.errors import ConfigError, UnsupportedError
from nemotron_steps.models.adapters import adapter_pairs, lora_candidates, lora_modules, recorded_base
from nemotron_steps.models.architecture import Architecture, facts_of, hf_folder, read_config
from nemotron_steps.models.huggingface import in_two_files
from nemotron_steps.models.mapping import Stored, check_stored

MODEL_PORTS = ("policy", "model")
"""What the training steps call the port of the model that they train."""


def check_placement(config: SftConfig | DpoConfig, inputs: Mapping[str, Artifact | None]) -> None:
    """Refuse what a step that trains without generating cannot place. See StepTable.preflight."""
    raise_if_ray_needed(config)
    refuse_violations(config, inputs)


def refuse_violations(config: SftConfig | DpoConfig | RlConfig, inputs: Mapping[str, Artifact | None]) -> None:
    """A layout that does not come out even over the model, as far as it is there, the devices and the batch."""
    folder = config.policy.checkpoint
    if folder is None or not all(_is_here(folder, port, inputs) for port in MODEL_PORTS):
        raise_if_violated(violations(parallel_config_of(config), ModelSpec.from_scratch(getter(config))))
        return
    model = facts_of(folder)
    raise_if_violated(violations(parallel_config_of(config), model))
    if config.policy.dtensor_cfg.enabled and model is not None and hf_folder(folder) == Path(folder):
        check_tensors(Path(folder))
    peft, lora = config.policy.megatron_cfg.peft, config.policy.dtensor_cfg.lora_cfg
    if peft.enabled:
        adapter_pairs(Architecture.from_folder(folder), peft, key="policy.megatron_cfg.peft")
    if lora.enabled:
        lora_modules(lora_candidates(Architecture.from_folder(folder)), lora)


def _is_here(folder: str, port: str, inputs: Mapping[str, Artifact | None]) -> bool:
    """Whether a model can be looked at: its folder exists, and no earlier step will make another for that port."""
    return inputs.get(port, ...) is not None and Path(folder).is_dir()


_PLAIN = ("F64", "F32", "F16", "BF16")
_JUDGE_PORTS = {"genrm_model": "reward_model"}
"""Judge → the input that brings it; of the others only the config knows."""


def check_generation(
    config: EvalConfig | StagesEvalConfig | DifficultyConfig, inputs: Mapping[str, Artifact | None]
) -> None:
    """Refuse folders that a step cannot generate from. See StepTable.preflight."""
    if isinstance(config, StagesEvalConfig):
        models = {f"models.{name}": folder for name, folder in config.models.items()}
    else:
        models = {} if config.model is None else {"model": config.model}
    known: dict[str, ModelSpec] = {}
    for port, folder in models.items():
        if _is_here(folder, port, inputs):
            known[port] = check_tensors(Path(folder)).facts
    _refuse_of_vllm(known, config)
    check_graders(config, inputs)


def check_graders(
    config: EvalConfig | StagesEvalConfig | DifficultyConfig | RlConfig, inputs: Mapping[str, Artifact | None]
) -> None:
    """Refuse folders here that a step's judges cannot generate from, and a reward function that does not load."""
    custom = config.env.nemo_gym.environments.get("reward_function")
    for each in custom.get("functions", ()) if isinstance(custom, Mapping) else ():
        if isinstance(each, Mapping) and isinstance(each.get("function"), str):
            load(each["function"])  # what a function of the user's own needs may not be installed here
    known: dict[str, ModelSpec] = {}
    for role in JUDGE_ROLES:
        judge = config.env.nemo_gym.judge(role)
        if judge is None or judge.backend == "http" or judge.model is None:
            continue
        if _is_here(judge.model, _JUDGE_PORTS.get(role, ""), inputs):
            check_judge = check_known_tensors if judge.backend == "vllm" else check_tensors
            architecture = check_judge(Path(judge.model))
            if architecture is not None:
                known[f"{JUDGES}.{role}.responses_api_models.vllm_model.model"] = architecture.facts
    _refuse_of_vllm(known, config)


def _refuse_of_vllm(models: Mapping[str, ModelSpec], config: Section) -> None:
    """ConfigError for what vLLM would refuse of models that no plan could look at: cuts, and lengths."""
    get = getter(config)
    for together in vllm_violations(models, get):
        raise_if_violated(together.violations)
    for model_key, model in models.items():
        for each in limit_violations(model_key, model_key, model, get) if vllm_keys(model_key, get) is not None else ():
            raise each


def check_tensors(folder: Path, architecture: Architecture | None = None) -> Architecture:
    """Refuse a folder whose tensors are not those of its config.json, by the first that is not."""
    architecture = architecture or Architecture.from_folder(folder)
    stored: dict[str, Stored] = {}
    file_of: dict[str, str] = {}
    for shard in safetensors_shards(folder):
        for name, entry in read_safetensors_header(shard).items():
            if file_of.setdefault(name, shard.name) != shard.name:
                raise in_two_files(name, folder, file_of[name], shard.name)
            stored[name] = Stored(entry["dtype"].lower(), tuple(entry["shape"]), entry["dtype"] in _PLAIN)
    check_stored(stored, architecture, str(folder))
    return architecture


def check_known_tensors(folder: Path) -> Architecture | None:
    """`check_tensors` of a folder whose family may be unknown here (None), or that is a Megatron checkpoint."""
    if hf_folder(folder) != folder or str(read_config(folder / "config.json").get("model_type")) not in FAMILIES:
        return None
    try:
        architecture = Architecture.from_folder(folder)
    except UnsupportedError:
        return None
    return check_tensors(folder, architecture)


def check_converted(config: ConvertConfig, inputs: Mapping[str, Artifact | None]) -> None:
    """Refuse a Hugging Face folder that cannot be converted. See StepTable.preflight."""
    for source in inputs.values():
        if source is not None:
            check_tensors(source.path)


def check_base(config: MergeConfig, inputs: Mapping[str, Artifact | None]) -> None:
    """Refuse a folder that an adapter cannot be added to: the given one, else what the adapter names."""
    adapter, base = inputs.get("adapter"), config.base
    if base is None and adapter is not None:
        base = recorded_base(adapter.path)
    if base is not None and _is_here(base, "base", inputs):
        check_known_tensors(Path(base))


def check_rl(config: RlConfig, inputs: Mapping[str, Artifact | None]) -> Iterable[str]:
    """Refuse what the step would refuse when it starts, as far as its prompts exist. See StepTable.preflight."""
    raise_if_ray_needed(config)
    refuse_violations(config, inputs)
    check_graders(config, inputs)
    if "validation" in inputs and not validation_keys(config):
        raise ConfigError(
            "there are prompts to validate on, and nothing asks for a validation",
            where="input validation",
            expected="grpo.val_period, grpo.val_at_start or grpo.val_at_end",
            hints=("grpo.val_period=10", "grpo.val_at_start=true grpo.val_at_end=true"),
        )
    if isinstance(config, OpdConfig):
        config = _with_teachers(config, inputs)
        teacher_choice(config)
    if any(inputs.get(port, ...) is None for port in ("prompts", "validation")):
        return ()  # whatever the config names gives way to what an earlier step will make
    if "policy" in inputs and inputs["policy"] is None:
        config = config.model_copy(update={"policy": config.policy.model_copy(update={"checkpoint": None})})
    rows = read_data(config, made_by=maker_of_prompts(inputs))
    needs = check_run_rows(config, rows)
    prompt_stream(config, rows.train)
    return needs.programs


def maker_of_prompts(inputs: Mapping[str, Artifact | None]) -> str:
    """The step that made the `prompts` input; "" where none did."""
    prompts = inputs.get("prompts")
    return prompts.producer.step if prompts is not None and prompts.producer is not None else ""


def _with_teachers(config: OpdConfig, inputs: Mapping[str, Artifact | None]) -> OpdConfig:
    """With the teachers that earlier steps will make, which so far have a name only."""
    distillation = config.on_policy_distillation
    named = {port.removeprefix("teachers."): "" for port in inputs if port.startswith("teachers.")}
    update = {"teachers": {**named, **distillation.teachers}}
    return config.model_copy(update={"on_policy_distillation": distillation.model_copy(update=update)})


def check_supervised(config: SftConfig | GenRmConfig, inputs: Mapping[str, Artifact | None]) -> None:
    """Refuse a config without a model, or whose ranks need Ray. Chats are looked at when their artifact is opened."""
    if config.policy.checkpoint is None and config.from_scratch is None and "model" not in inputs:
        raise nothing_to_train()
    if config.policy.adapters.enabled and config.policy.checkpoint is None and "model" not in inputs:
        raise ConfigError(
            "an adapter belongs to a checkpoint, and this step would start a new model",
            where="policy.megatron_cfg.peft.enabled",
            expected="a checkpoint at policy.checkpoint",
            found="from_scratch",
            hints=["--input model=PATH", "policy.megatron_cfg.peft.enabled=false"],
        )
    check_placement(config, inputs)


def nothing_to_train() -> ConfigError:
    """Neither a checkpoint nor the shape of a new model."""
    return ConfigError(
        "nothing to train: neither a checkpoint nor a shape for a new model",
        where="policy.checkpoint",
        hints=["--input model=PATH", "+from_scratch.hidden_size=128"],
    )
