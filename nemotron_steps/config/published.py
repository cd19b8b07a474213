"""Keys of the published Nemotron 3 RL configs that no schema here has: renamed, always so, or refused with the reason.

Keys that a schema has mean the same in both. docs/published_keys.md lists them all.
"""

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from nemotron_steps.config.compose import KeyPath, origin_of
from nemotron_steps.config.schema.base import get_raw, put_raw
from nemotron_steps.errors import ConfigError


@dataclass(frozen=True)
class Published:
    """One key, or all that a pattern matches.

    Attributes:
        pattern: dotted; `*` is any one part, a last `**` any further ones.
        ours: the key here that means the same, with {0}, {1}, … for what each `*` stands for; None if there is none.
        values: value there → value here, where values have other names.
        also: further keys here, with the values that the key implies; `=` is the key's own.
        holds: values that are always so here, so that saying them changes nothing. A text `=KEY` is the value of KEY.
        why: why it is always so, or why the key is refused.
    """

    pattern: str
    ours: str | None = None
    values: Mapping[Any, Any] = field(default_factory=dict)
    also: Mapping[str, Any] = field(default_factory=dict)
    holds: tuple[Any, ...] = ()
    why: str = ""


def _always(pattern: str, *values: Any, why: str) -> Published:
    return Published(pattern, holds=values, why=why)


def _refused(why: str, *patterns: str) -> tuple[Published, ...]:
    return tuple(Published(pattern, why=why) for pattern in patterns)


_MEGATRON = "policy.megatron_cfg"
_VLLM = "policy.generation.vllm_cfg"
_CHAT = f"{_VLLM}.http_server_serving_chat_kwargs"
_DDP = f"{_MEGATRON}.distributed_data_parallel_config"
RESOURCES, _DEVICES = (f"policy.generation.colocated.{key}" for key in ("resources", "generation_devices"))
_SWE = "env.nemo_gym.*.responses_api_agents.swe_agents"
_GENRM = "genrm_simple_agent"
_EFFORT = {"string": "string", "weight": "weight", "penalty": "penalty", "ub": "upper_bound_tokens"}
_JUDGES = {"genrm_model": "genrm_model", "nl2bash_judge_model": "judge_model", "safety_judge_model": "safety_model"}
"""Judges there → roles here."""


def _judge(theirs: str, role: str) -> tuple[Published, ...]:
    there = f"env.nemo_gym.{theirs}.responses_api_models.vllm_model"
    here = f"env.nemo_gym.{role}.responses_api_models.vllm_model"
    renamed = {
        "router_dp_size": "replicas",
        "server_args.tensor_parallel_size": "tensor_parallel_size",
        "server_args.gpu_memory_utilization": "gpu_memory_utilization",
        "server_args.max_model_len": "max_total_sequence_length",
        "server_args.max_num_seqs": "max_sequences",
        **({} if theirs == role else {"model": "model"}),
    }
    return (
        *(Published(f"{there}.{key}", f"{here}.{ours}") for key, ours in renamed.items()),
        Published(f"{there}.spinup_server", f"{here}.backend", values={True: "vllm", False: "http"}),
        _always(f"{there}.entrypoint", "app.py", why="a judge is a model here, not a program"),
        *_refused("a judge that is started here has no address; backend=http asks another's", f"{there}.base_url"),
        *_refused("keys are read from the environment variable that api_key_env names", f"{there}.api_key"),
        _always(f"{there}.return_token_id_information", False, why="a judge is not trained"),
        _always(f"{there}.uses_reasoning_parser", theirs == "genrm_model", why="what it thinks is always taken off"),
        _always(f"{there}.server_args.data_parallel_size", 1, why="copies are counted by replicas"),
        _always(f"{there}.server_args.reasoning_parser", "deepseek_r1", why="as uses_reasoning_parser"),
        *_refused("other options of a judge are left to vLLM; it is offered no tools", f"{there}.server_args.**"),
        *_refused("set the variable where the run is started", f"{there}.server_env.**"),
    )


TABLE: tuple[Published, ...] = (
    # -- launching
    *_refused("code runs in this project's own sandbox; an agent's images are its server's", "run.env.sandbox.**"),
    *_refused("a config has container, nodes, gpus_per_node, ntasks_per_node; env.toml the rest", "run.env.**"),
    *_refused("inputs are given with --input, and ${art:NAME} reads one", "run.**"),
    *_refused("what a file builds on is a list, as in Hydra: `defaults: [rlvr1]`", "defaults"),
    *_refused("container images of an agent are the agent server's", "sif_dir"),
    *_refused("metrics are in the run's folder; tables of env.toml mirror them ([wandb], [tensorboard])", "logger.**"),
    # -- data preparation
    Published("val_holdout", "rows.validation"),
    *_refused("what a step makes is an artifact of the home", "output_dir"),
    _always("force", False, why="`steps run --force` makes anew what is there"),
    # -- checkpoints
    Published("checkpointing.metric_name", values={"val:total_reward/mean": "validation/reward"}),
    *_refused("checkpoints are in the run's work folder, and go when it is done", "checkpointing.checkpoint_dir"),
    _always("checkpointing.model_save_format", "safetensors", why="models are written as safetensors"),
    _always("checkpointing.save_consolidated", False, why="a training checkpoint is in one file a rank"),
    # -- grpo
    *_refused("validation prompts are sampled together, as many at once as generators take", "grpo.val_batch_size"),
    _always("grpo.use_best_at_k", False, why="training on the best of k is not built"),
    *_refused("training on the best of k is not built (published: off)", "grpo.best_at_k_*"),
    _always("grpo.use_combined_training", False, why="combined pass@1 and best@k training is not built"),
    *_refused("combined pass@1 and best@k training is not built (published: off)", "grpo.combined_training_*"),
    _always("grpo.dynamic_sampling_oversample_ratio", 1.0, why="batch_multiplier says how many prompts are sampled"),
    # The Nano3 page's own names, which its config does not have.
    Published("grpo.num_iterations", "grpo.max_num_steps"),
    Published("grpo.learning_rate", f"{_MEGATRON}.optimizer.lr", also={f"{_MEGATRON}.optimizer.min_lr": "="}),
    *(Published(f"effort_levels.low_{key}", f"grpo.low_effort.{ours}") for key, ours in _EFFORT.items()),
    *(Published(f"env.nemo_gym.effort_levels.low_{key}", f"grpo.low_effort.{ours}") for key, ours in _EFFORT.items()),
    # What chose prompts in the training, before data preparation did.
    *_refused(
        "the string in a prompt decides, whoever put it there: low_effort.* of data_prep/rl_prep does",
        *(f"grpo.low_effort.{key}" for key in ("enabled", "instruction", "fraction*", "environments*")),
    ),
    # -- policy
    Published("policy.model_name", "policy.checkpoint"),
    _always("policy.tokenizer.name", "=policy.checkpoint", why="the tokenizer is the checkpoint's own"),
    _always("policy.hf_config_overrides", {}, why="a model is what its config.json says"),
    *_refused("generators decode continuously; vllm_cfg.max_num_seqs bounds them", "policy.generation_batch_size"),
    _always("policy.offload_optimizer_for_logprob", False, why="the optimizer stays where it is"),
    _always("policy.dtensor_cfg._v2", True, why="there is one dtensor policy"),
    _always("policy.dtensor_cfg.sequence_parallel", False, why="the dtensor policy cuts no sequences"),
    _always("policy.dtensor_cfg.context_parallel_size", 1, why="the dtensor policy cuts no sequences"),
    _always("policy.dtensor_cfg.custom_parallel_plan", None, why="a model's own plan is used"),
    *_refused("memory is given back where the phases of a step change", f"{_MEGATRON}.empty_unused_memory_level"),
    _always(f"{_MEGATRON}.expert_tensor_parallel_size", 1, why="an expert is whole on its rank"),
    _always(f"{_MEGATRON}.num_layers_in_*_pipeline_stage", None, why="stages have equally many layers"),
    _always(f"{_MEGATRON}.pipeline_dtype", "=policy.precision", why="stages exchange what they compute in"),
    _always(f"{_MEGATRON}.moe_router_dtype", "fp32", why="routers compute in float32"),
    _always(f"{_MEGATRON}.moe_router_load_balancing_type", "none", why="loads are balanced without a loss"),
    _always(f"{_MEGATRON}.moe_aux_loss_coeff", 0.0, why="loads are balanced without a loss"),
    _always(f"{_MEGATRON}.moe_router_enable_expert_bias", True, why="moe_router_bias_update_rate moves biases"),
    _always(f"{_MEGATRON}.moe_token_dispatcher_type", "alltoall", why="tokens travel to experts by all-to-all"),
    _always(f"{_MEGATRON}.moe_enable_deepep", False, why="tokens travel to experts by all-to-all"),
    _always(f"{_MEGATRON}.moe_shared_expert_overlap", False, why="nothing runs beside the all-to-all"),
    *_refused("a kernel of megatron-core's dispatchers, which are not used", f"{_MEGATRON}.moe_permute_fusion"),
    *_refused("a kernel of megatron-core's attention; the one here fuses by itself", f"{_MEGATRON}.apply_rope_fusion"),
    _always(f"{_MEGATRON}.bias_activation_fusion", False, why="activations have no bias"),
    _always(f"{_MEGATRON}.defer_fp32_logits", True, why="logits are made in float32 where logprobs are, in chunks"),
    *_refused("the load of experts is not among the metrics", f"{_MEGATRON}.track_moe_metrics"),
    *_refused("the load of experts is not among the metrics", f"{_MEGATRON}.moe_per_layer_logging"),
    _always(f"{_MEGATRON}.do_not_average_loss", True, why="a loss is a sum over the global batch's tokens"),
    _always(f"{_MEGATRON}.calculate_per_token_loss", True, why="a loss is a sum over the global batch's tokens"),
    _always(f"{_MEGATRON}.cp_normalize", True, why="a loss is a sum over the global batch's tokens"),
    _always(f"{_MEGATRON}.scale_loss_by_dp_cp_size", False, why="a loss is a sum over the global batch's tokens"),
    _always(f"{_MEGATRON}.optimizer.optimizer", "adam", why="Adam is the only one"),
    _always(f"{_MEGATRON}.optimizer.bf16", True, why="the precision is policy.precision's"),
    _always(f"{_MEGATRON}.optimizer.fp16", False, why="the precision is policy.precision's"),
    _always(f"{_MEGATRON}.optimizer.params_dtype", "float32", why="the optimizer's weights are float32"),
    *_refused("Adam is the only optimizer", f"{_MEGATRON}.optimizer.sgd_momentum"),
    Published(f"{_MEGATRON}.optimizer.clip_grad", "policy.max_grad_norm"),
    _always(f"{_MEGATRON}.scheduler.*_weight_decay", f"={_MEGATRON}.optimizer.weight_decay", why="it is constant"),
    _always(f"{_MEGATRON}.scheduler.weight_decay_incr_style", "constant", why="weight decay is constant"),
    _always(f"{_DDP}.grad_reduce_in_fp32", True, why="gradients add up and travel in float32"),
    _always(f"{_DDP}.average_in_collective", False, why="a loss is a sum over the global batch's tokens"),
    _always(f"{_DDP}.use_custom_fsdp", False, why="policy.dtensor_cfg is the FSDP here"),
    *_refused("gradients travel once, after the last micro-batch", f"{_DDP}.overlap_*"),
    *_refused("for megatron-core's FSDP (published: off)", f"{_DDP}.data_parallel_sharding_strategy"),
    _always(f"{_MEGATRON}.fp8_cfg.enabled", False, why="FP8 training is not built"),
    *_refused("FP8 training is not built (published: off)", f"{_MEGATRON}.fp8_cfg.**"),
    _always(f"{_MEGATRON}.env_vars", None, why="set variables where the run is started"),
    # -- generation
    *_refused("every port is bound by the process that uses it, where it is free", "policy.generation.port_range_*"),
    Published(f"{RESOURCES}.num_nodes", _DEVICES, why="times gpus_per_node beside it, else the cluster's"),
    Published(f"{RESOURCES}.gpus_per_node", _DEVICES, why="with num_nodes beside it"),
    _always(f"{_VLLM}.precision", "=policy.precision", why="rollouts are sampled in the precision of training"),
    _always(f"{_VLLM}.kv_cache_dtype", "auto", why="the KV cache has the precision of training"),
    _always(f"{_VLLM}.pipeline_parallel_size", 1, why="a generator's GPUs share every layer"),
    _always(f"{_VLLM}.max_model_len", "=policy.max_total_sequence_length", why="the longest sequence of the run"),
    _always(f"{_VLLM}.use_deep_gemm", False, why="for FP8"),
    _always(f"{_VLLM}.num_*_layers_in_bf16", 0, why="for FP8"),
    *_refused("the run's metrics count tokens, rollouts and seconds", f"{_VLLM}.*vllm_metrics_logger*"),
    _always(f"{_VLLM}.skip_tokenizer_init", False, why="agents are served with the tokenizer"),
    _always(f"{_CHAT}.enable_auto_tools", True, why="agents may call the tools that they offer"),
    Published(f"{_CHAT}.tool_parser", "policy.generation.tool_parser"),
    Published(f"{_CHAT}.reasoning_parser", "policy.generation.reasoning_parser"),
    *_refused("nano_v3 is built in", f"{_CHAT}.reasoning_parser_plugin"),
    Published(f"{_CHAT}.chat_template_kwargs.*", "policy.tokenizer.chat_template_kwargs.{0}"),
    Published(f"{_VLLM}.enable_thinking", "policy.tokenizer.chat_template_kwargs.enable_thinking"),
    _always(f"{_VLLM}.enable_prefix_caching", True, why="prompts are computed once for a group"),
    Published("policy.generation.vllm_kwargs.max_num_seqs", f"{_VLLM}.max_num_seqs"),
    # -- data
    Published("data.train_jsonl_fpath", "data.train.data_path"),
    Published("data.validation_jsonl_fpath", "data.validation.data_path"),
    *_refused("rows are read when the run starts", "data.num_workers"),
    _always("data.default.dataset_name", "NemoGymDataset", why="rows are in NeMo-Gym's shape"),
    _always("data.default.env_name", "nemo_gym", why="rows are in NeMo-Gym's shape"),
    _always("data.default.processor", "nemo_gym_data_processor", why="rows are in NeMo-Gym's shape"),
    _always("data.default.*prompt_file", None, why="a row has its whole prompt"),
    # -- environments
    _always("env.use_genrm_compare", True, why="a row's agent_ref names its environment"),
    _always("env.genrm_agent_names", [_GENRM, f"{_GENRM}_reasoning_off"], why="both names lead to genrm_compare"),
    _always("env.genrm_compare_server_name", "genrm_compare", why="the environment's name"),
    _always("env.should_log_nemo_gym_responses", False, why="samples.jsonl has some rollouts of each step"),
    _always("env.nemo_gym.skip_venv_if_present", True, why="environments have no virtual environment of their own"),
    *_refused("servers listen on loopback unless a remote environment is named", "env.nemo_gym.use_absolute_ip"),
    *_refused("every port is bound by the process that uses it, where it is free", "env.nemo_gym.port_range_*"),
    *_refused("environments are known by name, and asked for by the rows", "env.nemo_gym.config_paths"),
    *(row for theirs, role in _JUDGES.items() for row in _judge(theirs, role)),
    *_refused(
        "rollouts are the policy's, always", "env.nemo_gym.*.responses_api_agents.simple_agent.model_server.name"
    ),
    _always(
        "env.nemo_gym.*.resources_servers.*.judge_model_server.name",
        "nl2bash_judge_model",
        "safety_judge_model",
        "policy_model",
        why="each environment asks the judge of its role: judge_model, and safety_model about safety",
    ),
    _always("env.nemo_gym.*.resources_servers.*.*_model_server.type", "responses_api_models", why="judges are models"),
    _always(
        "env.nemo_gym.genrm_compare.resources_servers.genrm_compare.genrm_model_server.name",
        "genrm_model",
        why="genrm_compare asks genrm_model",
    ),
    _always("env.nemo_gym.code_gen.resources_servers.code_gen.debug", False, why="there is no such mode"),
    Published(
        "env.nemo_gym.lc_judge.resources_servers.equivalence_llm_judge.*.*",
        "env.nemo_gym.environments.lc_judge_simple_agent.{0}.{1}",
    ),
    Published("env.nemo_gym.*.resources_servers.*.*.*", "env.nemo_gym.environments.{1}.{2}.{3}"),
    Published("env.nemo_gym.*.resources_servers.*.*", "env.nemo_gym.environments.{1}.{2}"),
    Published(f"{_SWE}.agent_max_turns", "grpo.max_rollout_turns"),
    Published(f"{_SWE}.concurrency", "env.nemo_gym.environments.{0}.max_concurrency"),
    Published(f"{_SWE}.swebench_agent_timeout", "env.nemo_gym.environments.{0}.timeout_s"),
    *_refused("the agent's own server has these settings (environment remote_agent)", f"{_SWE}.*"),
)
"""The first row that matches a key counts."""


@lru_cache(maxsize=1)
def _patterns() -> list[tuple[re.Pattern[str], Published]]:
    found = []
    for row in TABLE:
        text = re.escape(row.pattern.removesuffix(".**")).replace(r"\*", r"([^.]*)")
        found.append((re.compile(text + (r"(?:\..+)" if row.pattern.endswith(".**") else "")), row))
    return found


def find(key: str) -> tuple[Published, tuple[str, ...]] | None:
    """The row of a published key, and what each `*` of its pattern stands for; None if it is none."""
    found = ((row, pattern.fullmatch(key)) for pattern, row in _patterns())
    return next(((row, match.groups()) for row, match in found if match is not None), None)


def is_foreign(key: str, has_key: Callable[[str], bool]) -> bool:
    """Whether a key is none of the schema's, or one that a free-form section would take and that has another name."""
    return not has_key(key) or any(key == row.pattern and row.ours is not None for row in TABLE)


def translate(
    values: dict[str, Any], has_key: Callable[[str], bool], origins: dict[KeyPath, str]
) -> tuple[dict[str, Any], list[ConfigError]]:
    """A config's composed values with every published key that the schema lacks renamed, or left out where it says what
    is always so; and an error for each that is refused. Keys that are neither the schema's nor published stay. The
    values are not changed; origins of renamed keys are added."""
    found: list[tuple[KeyPath, Any, Published, tuple[str, ...]]] = []
    left = copy.deepcopy(values)
    for path, value in _leaves(values, ()):
        key = ".".join(path)
        foreign = is_foreign(key, has_key)
        row_and_parts = find(key) if foreign or isinstance(value, str) else None
        # Or the schema has another name for the value.
        if row_and_parts is not None and (foreign or value in row_and_parts[0].values):
            found.append((path, value, *row_and_parts))
            _remove(left, path)
    for path, value, row, parts in found:
        if row.ours is None and not row.values:
            continue
        new = _value(row, path, value, values)
        for key, given in {(row.ours or row.pattern).format(*parts): new, **row.also}.items():
            left = put_raw(left, key, value if given == "=" else given)
            if origin := origin_of(origins, path):
                origins[tuple(key.split("."))] = origin
    problems = []
    for path, value, row, _ in found:
        if row.ours is not None or row.values:
            continue
        allowed = [get_raw(left, each[1:]) if str(each).startswith("=") else each for each in row.holds]
        if any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in allowed):
            continue
        what = "the key '{}' has no meaning here: {}"
        what = "the published key '{}' can be nothing else here: {}" if allowed else what
        expected = " or ".join("null" if each is None else str(each) for each in allowed)
        problems.append(
            ConfigError(
                what.format(".".join(path), row.why),
                where=origin_of(origins, path),
                expected=expected or None,
                found=("null" if value is None else str(value)) if allowed else None,
                hints=("docs/published_keys.md",),
            )
        )
    return left, problems


def _value(row: Published, path: KeyPath, value: Any, values: Mapping[str, Any]) -> Any:
    if ".".join(path).startswith(f"{RESOURCES}."):
        nodes, gpus = (get_raw(values, f"{RESOURCES}.{key}") for key in ("num_nodes", "gpus_per_node"))
        gpus = gpus if gpus is not None else get_raw(values, "cluster.gpus_per_node")
        return nodes * gpus if type(nodes) is int and type(gpus) is int else None
    return row.values.get(value, value) if isinstance(value, str | bool | int | float) else value


def _leaves(node: Mapping[str, Any], path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    for name, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*path, str(name)))
        else:
            yield (*path, str(name)), value


def _remove(values: dict[str, Any], path: KeyPath) -> None:
    """Take a key out, and every group that is empty then."""
    nodes = [values]
    for part in path[:-1]:
        nodes.append(nodes[-1][part])
    for node, part in zip(reversed(nodes), reversed(path), strict=True):
        del node[part]
        if node:
            break
