"""Config of the GRPO steps (rlvr, rlhf, swe), under NeMo-RL's key names."""

import re
import tomllib
from collections.abc import Iterator
from importlib.resources import files
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, model_validator

from nemotron_steps.config.schema.base import OPERATIONAL, OnlyIf, Rule, Section, get_raw, move_alias, put_raw
from nemotron_steps.config.schema.grpo import GrpoConfig, LossFnConfig, RewardPenaltiesConfig
from nemotron_steps.config.schema.policy import OF_POLICY, GeneratingPolicyConfig, option_rules
from nemotron_steps.config.schema.reward import RewardedConfig


class VllmModelConfig(Section):
    """A judge model: local weights run in this process or by vLLM, or an OpenAI-compatible server."""

    model: str | None = None
    """Hugging Face folder or model name; backend http: what its server calls it, None: the first that it lists."""
    backend: Literal["embedded", "vllm", "http"] = "embedded"
    base_url: Annotated[str | tuple[str, ...] | None, OnlyIf("backend", "http")] = None
    """backend http: the server's URL, up to `/v1`, or a list of servers of one model: each question goes to the least
    loaded, and one that gives no answer is routed around."""
    api_key_env: Annotated[str | None, OPERATIONAL] = None
    """backend http: environment variable that holds the key."""
    replicas: Annotated[PositiveInt | None, OPERATIONAL] = None
    """Copies of a local judge, under cluster.backend=ray; each question goes to one. None: as many as fill the GPUs of
    env.nemo_gym.num_gpu_nodes, which the judges share equally; 1 where judges have no nodes of their own."""
    tensor_parallel_size: Annotated[PositiveInt, OPERATIONAL, OnlyIf("backend", "vllm")] = 1
    """backend vllm: GPUs of one copy."""
    gpu_memory_utilization: Annotated[float, OPERATIONAL] = Field(0.8, gt=0, le=1)
    """backend vllm on CUDA: share of a GPU's memory; less where a judge shares it with a generator."""
    max_sequences: Annotated[PositiveInt, OPERATIONAL] = 256
    max_total_sequence_length: PositiveInt = 32_768
    readiness_timeout_s: Annotated[PositiveFloat, OPERATIONAL] = 600.0
    max_retries: Annotated[int, OPERATIONAL] = Field(3, ge=0)

    def _broken_rules(self) -> Iterator[Rule]:
        if self.backend == "http" and not self.base_url:
            what = "a judge with backend=http needs the base_url of its server"
            yield Rule("backend", what, "base_url=http://127.0.0.1:8000/v1")


class ResponsesApiModelsConfig(Section):
    """The judge's model server, under NeMo-Gym's name."""

    vllm_model: VllmModelConfig = VllmModelConfig()


class JudgeModelConfig(Section):
    """One judge."""

    responses_api_models: ResponsesApiModelsConfig = ResponsesApiModelsConfig()


JUDGE_ROLES = ("genrm_model", "judge_model", "safety_model")


class NemoGymConfig(Section):
    """`env.nemo_gym`: judges, and options of each environment by its name."""

    genrm_model: JudgeModelConfig = JudgeModelConfig()
    judge_model: JudgeModelConfig | None = None
    """Equivalence, rubric and math judge; None: environments that need one refuse to start."""
    safety_model: JudgeModelConfig | None = None
    invalid_tool_call_patterns: tuple[str, ...] | None = None
    """What no answer may have in its text beside its tool calls; None: what policy.generation.tool_parser writes."""
    thinking_tags: tuple[str, str] = ("<think>", "</think>")
    """Opening and closing tag that malformed thinking is told by."""
    environments: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Options of an environment; each environment refuses options it does not know."""
    num_gpu_nodes: Annotated[int, OPERATIONAL] = Field(0, ge=0)
    """Nodes of the cluster kept for judges; the policy and its generators get the others."""

    def judge(self, role: str) -> VllmModelConfig | None:
        """The model that plays one of JUDGE_ROLES; None when not configured."""
        chosen: JudgeModelConfig | None = getattr(self, role)
        return chosen.responses_api_models.vllm_model if chosen is not None else None


class EnvConfig(Section):
    """`env.*`."""

    should_use_nemo_gym: Annotated[bool, OnlyIf("environment")] = True
    """True: each row's agent_ref names its environment. False: every row goes to `environment`."""
    environment: str | None = None
    nemo_gym: NemoGymConfig = NemoGymConfig()

    @property
    def only_environment(self) -> str | None:
        """The one environment that every row goes to; None where each row names its own."""
        return None if self.should_use_nemo_gym else self.environment


class DataFileConfig(Section):
    """One JSON Lines file of prompts."""

    data_path: str | None = None


class PromptFilesConfig(Section):
    """`data.*`: the splits of prompts."""

    train: DataFileConfig = DataFileConfig()
    validation: DataFileConfig = DataFileConfig()
    heldout: DataFileConfig = DataFileConfig()
    """Neither trained on nor used to choose anything; the final figures come from them."""


class DataConfig(PromptFilesConfig):
    """`data.*` of a GRPO step."""

    shuffle: bool = True
    max_input_seq_length: PositiveInt | None = None
    """Prompts of more tokens (without the template's) are left out; None: one without room for an answer is refused."""


class ClusterConfig(Section):
    """`cluster.*`: where the workers run."""

    backend: Literal["process", "ray"] = "process"
    """process: everything in this process. ray: actors for policy workers, generators, environments and judges."""
    num_nodes: PositiveInt = 1
    gpus_per_node: int = Field(0, ge=0)
    """0: CPU workers."""
    gpu_memory_gib: PositiveFloat = 80.0
    """Of one GPU, for what a plan predicts and refuses: 80 for an H100, 141 for an H200."""
    ray_address: str | None = None
    """An existing Ray cluster; None: the one RAY_ADDRESS names, else one that is started on this machine."""
    policy_workers: PositiveInt | None = None
    """Policy ranks on CPU (gloo); on GPUs it follows from the devices."""


def parse_duration(text: str) -> float:
    """Seconds in HH:MM, HH:MM:SS or DD:HH:MM:SS, as job schedulers write them. ValueError for anything else."""
    found = re.fullmatch(r"(?:(\d+):)??(\d+):([0-5]?\d)(?::([0-5]?\d))?", text)
    if found is None or (found[1] is not None and int(found[2]) > 23):
        forms = "HH:MM, HH:MM:SS or DD:HH:MM:SS, with at most 59 minutes and seconds"
        raise ValueError(f"{text} must be a duration, {forms}")
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _duration(text: str) -> str:
    parse_duration(text)
    return text


class CheckpointingConfig(Section):
    """`checkpointing.*`: training checkpoints inside the run."""

    enabled: bool = True
    save_period: PositiveInt = 10
    keep_top_k: PositiveInt | None = 3
    metric_name: str | None = None
    """Metric by which the keep_top_k best checkpoints are kept, besides the newest; None: the keep_top_k newest."""
    higher_is_better: bool = True
    checkpoint_must_save_by: Annotated[str, AfterValidator(_duration)] | None = None
    """Wall time (DD:HH:MM:SS or HH:MM) since the run began by which a checkpoint is committed and the run stops, to be
    resumed: it saves when another step and its save might not be over in time."""
    save_async: bool = False


class HeldoutConfig(Section):
    """`heldout.*`: grading before and after training on prompts that training never sees."""

    share: float | None = Field(None, ge=0, lt=1)
    """Of the distinct training prompts, held out where no prompts are given for it. None: a tenth, 64 at most, of 50 or
    more prompts of the user's own (data_prep/import_prompts) that have no validation rows either."""
    environment: str | None = None
    """Grades every held-out row; None: each row's own environment. A rule here checks what a judge claims."""
    max_prompts: PositiveInt | None = None
    samples_per_prompt: PositiveInt = 4
    temperature: float = Field(1.0, ge=0)


class SignalsConfig(Section):
    """`signals.*`."""

    stop_on: tuple[str, ...] = ()
    """Signals that end the run, once the step that raised them is saved. Resumed, it goes on."""

    def _broken_rules(self) -> Iterator[Rule]:
        if not self.stop_on:
            return
        known = tomllib.loads((files("nemotron_steps.errors") / "signals.toml").read_text())
        known.pop("out_of_memory", None)  # reported with a failure
        unknown = [name for name in self.stop_on if name not in known]
        if unknown:
            what = f"signals.stop_on: there is no signal {', '.join(unknown)}; there are {', '.join(known)}"
            yield Rule("stop_on", what, f"stop_on=[{','.join(name for name in self.stop_on if name in known)}]")


class RlConfig(RewardedConfig):
    """The whole config of a GRPO step."""

    grpo: GrpoConfig = GrpoConfig()
    loss_fn: LossFnConfig = LossFnConfig()
    reward_penalties: RewardPenaltiesConfig = RewardPenaltiesConfig()
    policy: GeneratingPolicyConfig = GeneratingPolicyConfig()
    env: EnvConfig = EnvConfig()
    data: DataConfig = DataConfig()
    heldout: HeldoutConfig = HeldoutConfig()
    cluster: Annotated[ClusterConfig, OPERATIONAL] = ClusterConfig()
    checkpointing: Annotated[CheckpointingConfig, OPERATIONAL] = CheckpointingConfig()
    signals: Annotated[SignalsConfig, OPERATIONAL] = SignalsConfig()

    @model_validator(mode="before")
    @classmethod
    def _aliases(cls, values: Any) -> Any:
        dtensor = get_raw(values, "policy.dtensor_cfg.enabled") is True
        target = "policy.optimizer.kwargs.lr" if dtensor else "policy.megatron_cfg.optimizer.lr"
        return move_alias(values, "grpo.learning_rate", target, PositiveFloat)

    @model_validator(mode="before")
    @classmethod
    def _one_update_a_step(cls, values: Any) -> Any:
        """Without a train_global_batch_size, all rollouts of a step make one update."""
        key = "policy.train_global_batch_size"
        if not isinstance(values, dict) or not isinstance(values.get("grpo", {}), dict) or get_raw(values, key):
            return values
        names = ("num_prompts_per_step", "num_generations_per_prompt")
        prompts, members = (get_raw(values, f"grpo.{name}") or GrpoConfig.model_fields[name].default for name in names)
        whole = isinstance(prompts, int) and isinstance(members, int)
        return put_raw(values, key, prompts * members) if whole else values

    def _broken_rules(self) -> Iterator[Rule]:
        yield from option_rules(self.policy.generation, "policy.generation", OF_POLICY)
        yield from self._broken_batch_rules()
        if self.grpo.adv_estimator.name == "opd" and not hasattr(self, "on_policy_distillation"):
            what = "grpo.adv_estimator.name=opd needs teachers, which the step rl/nemo_rl/opd has"
            yield Rule("grpo.adv_estimator.name", what, "grpo.adv_estimator.name=grpo")
        on_policy, corrects = self.loss_fn.force_on_policy_ratio, self.loss_fn.use_importance_sampling_correction
        if self.grpo.async_grpo.enabled and on_policy and not corrects:
            what = (
                "loss_fn.force_on_policy_ratio with grpo.async_grpo trains on rollouts of older weights as if they "
                "were of the newest, unless loss_fn.use_importance_sampling_correction weighs them"
            )
            yield Rule("loss_fn.force_on_policy_ratio", what, "loss_fn.force_on_policy_ratio=false")
        if self.grpo.adv_estimator.name == "gdpo" and self.reward_penalties.any_enabled:
            what = "reward_penalties take a rollout's reward, but not the components of grpo.adv_estimator.name=gdpo"
            fix = "grpo.adv_estimator.name=grpo grpo.adv_estimator.components=[]"
            yield Rule("grpo.adv_estimator.name", what, fix)
        if self.policy.generation.temperature == 0:
            key = "policy.generation.temperature"
            yield Rule(key, f"{key}=0 samples the same answer every time: a group learns nothing", f"{key}=1")

    def _broken_batch_rules(self) -> Iterator[Rule]:
        """Rollouts fill whole batches, and the longest fits into a micro-batch: else the first as long ends the run."""
        key, batch = "policy.train_global_batch_size", self.policy.train_global_batch_size
        rollouts = self.grpo.num_prompts_per_step * self.grpo.num_generations_per_prompt
        product = f"num_prompts_per_step x num_generations_per_prompt = {rollouts}"
        if self.loss_fn.force_on_policy_ratio and batch != rollouts:
            yield Rule(key, f"loss_fn.force_on_policy_ratio needs {key} = {product}, not {batch}", f"{key}={rollouts}")
        elif rollouts % batch:
            yield Rule(key, f"grpo.{product} is not a multiple of {key} = {batch}", f"{key}={rollouts}")
        longest = max(self.policy.max_total_sequence_length, self.policy.max_total_sequence_length_end or 0)
        key, answer = "policy.generation.max_new_tokens", self.policy.generation.max_new_tokens
        if answer > longest and answer != 512:  # as it is by default
            yield Rule(key, f"{key}={answer} is never reached: sequences end at {longest} tokens", f"{key}={longest}")
        for section in ("sequence_packing", "dynamic_batching"):
            settings = getattr(self.policy, section)
            rounding = settings.sequence_length_round if self.policy.dtensor_cfg.enabled else 1
            needed = -(-longest // rounding) * rounding
            for name in ("train_mb_tokens", "logprob_mb_tokens"):
                budget, key = getattr(settings, name), f"policy.{section}.{name}"
                if settings.enabled and budget is not None and budget < needed:
                    what = f"{key}={budget} must hold the longest rollout, of {longest} tokens"
                    yield Rule(key, what, f"{key}={needed}")
