"""The parts of a run from their configs, in this process. The only place that chooses between embedded and vLLM,
Megatron and DTensor, and between a judge behind HTTP and one in a generator of this process.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemotron_steps.config.schema.grpo import AsyncGrpoConfig
from nemotron_steps.config.schema.policy import GenerationConfig, PolicyConfig, VllmConfig
from nemotron_steps.config.schema.rl import NemoGymConfig, VllmModelConfig
from nemotron_steps.engine.generation.sampler import AsyncSampler
from nemotron_steps.engine.losses.loss import Loss
from nemotron_steps.engine.reporting import Reporter
from nemotron_steps.engine.rollouts.collector import RolloutCollector
from nemotron_steps.engine.rollouts.conversation import TurnFormat
from nemotron_steps.engine.setup.rows import Needs
from nemotron_steps.engine.types import Generator, Policy, SamplingParams, Teachers
from nemotron_steps.engine.weight_sync.transfer import ChannelHandles
from nemotron_steps.environments.environment_set import POLICY_NAME, EnvironmentSet
from nemotron_steps.environments.judged.judges import HttpJudge, Judge, JudgeLostError, QuestionLabels, longer_context
from nemotron_steps.errors import ArtifactError, JudgeUnavailableError, UnsupportedError, WorkerLostError
from nemotron_steps.models.chat import ChatFormat
from nemotron_steps.waiting import waiting

if TYPE_CHECKING:
    import torch


def build_policy(config: PolicyConfig, checkpoint: Path, loss_fn: Loss, *, reference: bool, total_steps: int) -> Policy:
    """The trained model in this process (or this rank's part of it)."""
    if config.dtensor_cfg.enabled:
        from nemotron_steps.engine.policy.dtensor import DTensorPolicy

        fsdp: Policy = DTensorPolicy(config, checkpoint, loss_fn, reference=reference, total_steps=total_steps)
        return fsdp
    from nemotron_steps.engine.policy.megatron import MegatronPolicy

    return MegatronPolicy(config, checkpoint, loss_fn, reference=reference, total_steps=total_steps)


def build_teachers(policy: Policy, checkpoints: Mapping[str, Path], *, topk: int | None, offload: bool) -> Teachers:
    """Teachers beside the policy of this process (or rank); arguments as `FrozenTeachers`'s."""
    from nemotron_steps.engine.policy.megatron import MegatronPolicy
    from nemotron_steps.engine.policy.teachers import FrozenTeachers

    if not isinstance(policy, MegatronPolicy):
        raise UnsupportedError(
            "only the megatron policy learns from teachers",
            where="policy.dtensor_cfg.enabled",
            hints=("policy.dtensor_cfg.enabled=false",),
        )
    return FrozenTeachers(policy, checkpoints, topk, offload=offload)


def build_generator(
    hf_folder: Path,
    config: GenerationConfig,
    chat: ChatFormat,
    *,
    max_total_length: int,
    precision: str,
    weights: Iterable[tuple[str, torch.Tensor]] | ChannelHandles | None = None,
    asynchronous: AsyncGrpoConfig | None = None,
    record_routed_experts: bool = False,
) -> Generator:
    """The policy's generator."""
    overlapping = asynchronous is not None and asynchronous.enabled
    # A generator whose requests may never all be done has no moment for giving memory back; a judge has no policy.
    shares_device = asynchronous is not None and not overlapping and config.colocated.enabled
    if config.backend == "vllm":
        from nemotron_steps.engine.generation.vllm.generator import VllmGenerator

        return VllmGenerator(
            hf_folder,
            config.vllm_cfg,
            max_total_length=max_total_length,
            precision=precision,
            weights=weights,
            # An agent's request may be running whenever the weights change.
            in_flight_updates=config.vllm_cfg.expose_http_server or overlapping,
            recompute_kv_cache=asynchronous is not None and asynchronous.recompute_kv_cache_after_weight_updates,
            shares_device=shares_device,
            record_routed_experts=record_routed_experts,
            options=config.vllm_kwargs,
        )
    assert not isinstance(weights, ChannelHandles), "only processes of their own take up offers"
    import torch

    from nemotron_steps.engine.generation.embedded.generator import EmbeddedGenerator
    from nemotron_steps.models.architecture import Architecture
    from nemotron_steps.models.huggingface import load_hf_weights

    return EmbeddedGenerator(
        Architecture.from_folder(hf_folder),
        weights if weights is not None else load_hf_weights(hf_folder).items(),
        max_sequences=config.max_sequences,
        max_total_length=max_total_length,
        device="cuda" if torch.cuda.is_available() else "cpu",
        dtype=getattr(torch, precision),
        eos_token_ids=chat.end_ids,
        decode=chat.decode,
        recompute_kv_cache=asynchronous is not None and asynchronous.recompute_kv_cache_after_weight_updates,
        record_routed_experts=record_routed_experts,
    )


def sampling_params(config: GenerationConfig, chat: ChatFormat, seed: int | None) -> SamplingParams:
    """How rollouts are sampled; the ends of the chat's turns always stop one."""
    return SamplingParams(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        stop_token_ids=tuple(dict.fromkeys((*chat.end_ids, *config.stop_token_ids))),
        stop_strings=config.stop_strings,
        seed=seed,
    )


class GeneratorJudge:
    """Chat completions of a local model, batched with whatever else asks it at the time."""

    def __init__(
        self, sampler: AsyncSampler, chat: ChatFormat, *, max_total_length: int, length_key: str, seed: int
    ) -> None:
        self._sampler = sampler
        self._chat = chat
        self._max_total_length = max_total_length
        self._length_key = length_key
        self._seed = seed
        self._labels = QuestionLabels()

    def start_step(self, step: str) -> None:
        """Name the training step that the following questions belong to."""
        self._labels.start_step(step)

    async def complete(
        self, messages: Sequence[dict[str, Any]], *, temperature: float, top_p: float, max_tokens: int
    ) -> str:
        """The judge's whole answer, reasoning included."""
        prompt_ids = self._chat.render(messages)
        room = self._max_total_length - len(prompt_ids)
        if room < 1:
            raise JudgeUnavailableError(
                f"a question of {len(prompt_ids)} tokens does not fit the judge",
                expected=f"fewer than {self._max_total_length} tokens",
                hints=[longer_context(self._length_key, len(prompt_ids) + max_tokens)],
            )
        params = SamplingParams(
            max_new_tokens=min(max_tokens, room),
            temperature=temperature,
            top_p=top_p,
            stop_token_ids=self._chat.end_ids,
            seed=self._seed,
        )
        try:
            completion = await self._sampler.sample(prompt_ids, params, self._labels.next(messages))
        except WorkerLostError as error:
            raise JudgeLostError.of(error) from error
        return self._chat.decode(completion.token_ids)


def build_judges(
    config: NemoGymConfig, needed: Collection[str], *, defer_to: AsyncSampler | None, seed: int
) -> dict[str, Judge]:
    """A judge for every role in `needed`."""
    chosen = {role: judge for role in sorted(needed) if (judge := config.judge(role)) is not None}
    return {role: build_judge(role, judge, defer_to=defer_to, seed=seed) for role, judge in chosen.items()}


def build_judge(role: str, config: VllmModelConfig, *, defer_to: AsyncSampler | None, seed: int) -> Judge:
    """One judge: over HTTP, or a generator in this process."""
    if config.backend == "http":
        assert config.base_url is not None  # the schema requires it
        key, retries = config.api_key_env, config.max_retries
        judge = HttpJudge(config.base_url, config.model or "", api_key_env=key, retries=retries, seed=seed)
        judge.wait_until_ready(config.readiness_timeout_s)
        if config.model is None:
            judge.ask_for_listed_model()
        return judge
    folder = judge_folder(role, config)
    chat = ChatFormat.from_folder(folder)
    import torch

    generation = GenerationConfig(
        backend=config.backend,
        max_sequences=config.max_sequences,
        vllm_cfg=VllmConfig(
            tensor_parallel_size=config.tensor_parallel_size,
            gpu_memory_utilization=config.gpu_memory_utilization,
            max_num_seqs=config.max_sequences,
        ),
    )
    precision = "bfloat16" if torch.cuda.is_available() else "float32"
    try:
        generator = build_generator(
            folder, generation, chat, max_total_length=config.max_total_sequence_length, precision=precision
        )
    except UnsupportedError as error:
        # It names the keys of the policy's generator.
        where, hints = f"{_section(role)}.backend={config.backend}", [f"{_section(role)}.backend=embedded"]
        what, hints = f"judge {role}: {error.what}", hints if config.backend == "vllm" else []
        raise UnsupportedError(what, where=where, expected=error.expected, found=error.found, hints=hints) from error
    sampler = AsyncSampler(generator, name=role, defer_to=defer_to)
    return GeneratorJudge(
        sampler,
        chat,
        max_total_length=config.max_total_sequence_length,
        length_key=f"{_section(role)}.max_total_sequence_length",
        seed=seed,
    )


def _section(role: str) -> str:
    """Where a judge's config is."""
    return f"env.nemo_gym.{role}.responses_api_models.vllm_model"


def judge_folder(role: str, config: VllmModelConfig) -> Path:
    """Local folder of a judge's weights; a hub name is fetched through huggingface_hub's cache."""
    key = f"{_section(role)}.model"
    if config.model is None:
        raise ArtifactError(
            f"the judge {role} has no model", where=key, hints=[f"{key}=PATH", "--input reward_model=PATH"]
        )
    if os.path.isdir(config.model):
        return Path(config.model)
    from huggingface_hub import snapshot_download

    try:
        with waiting(f"the hub to send {config.model}"):
            return Path(snapshot_download(config.model))
    except Exception as error:  # the hub client raises many unrelated classes; all mean the same here
        raise ArtifactError(
            f"the model of judge {role} is neither a folder nor could it be fetched from the hub",
            where=key,
            expected="a Hugging Face folder, or a model name the hub serves",
            found=f"{config.model} ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})",
            hints=["--input reward_model=PATH", f"{key}=PATH"],
        ) from error


def build_collector(
    config: GenerationConfig,
    chat: ChatFormat,
    sampler: AsyncSampler,
    environments: EnvironmentSet,
    needs: Needs,
    *,
    seed: int,
    max_total_length: int,
    longest: int,
    reporter: Reporter,
    resources: ExitStack,
    max_turns: int = 1,
) -> RolloutCollector:
    """The collector of a run. Creates every environment that the rows need; none is started."""
    turn_format = TurnFormat.of(config, chat)
    if config.vllm_cfg.expose_http_server:
        from nemotron_steps.engine.serving.endpoint import Endpoint

        endpoint = resources.enter_context(
            Endpoint(
                sampler,
                chat,
                name=POLICY_NAME,
                max_total_length=longest,
                # Not seeded: requests come in no fixed order. A request may bring a seed of its own.
                defaults=sampling_params(config, chat, seed=None),
                turn_format=turn_format,
            )
        )
        environments.offer_policy(endpoint.url, endpoint.model_name)
        reporter.event("policy_endpoint", url=endpoint.url, model=endpoint.model_name)
    for name in needs.environments:
        environments.get(name)
    return RolloutCollector(
        sampler,
        chat,
        environments,
        sampling_params(config, chat, seed),
        max_total_length=max_total_length,
        max_turns=max_turns,
        turn_format=turn_format,
        reporter=reporter,
    )
