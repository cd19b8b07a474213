"""Judges: over HTTP, or a model in a generator of this process."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from nemotron_steps.config.schema.policy import GenerationConfig, VllmConfig
from nemotron_steps.config.schema.rl import NemoGymConfig, VllmModelConfig
from nemotron_steps.engine.generation.sampler import AsyncSampler
from nemotron_steps.engine.rollouts.judges import GeneratorJudge
from nemotron_steps.engine.setup.backends import build_generator
from nemotron_steps.environments.judged.judges import HttpJudge, Judge
from nemotron_steps.errors import ArtifactError, UnsupportedError
from nemotron_steps.models.chat import ChatFormat
from nemotron_steps.waiting import waiting


def build_judges(
    config: NemoGymConfig, needed: Collection[str], *, defer_to: AsyncSampler | None, seed: int
) -> dict[str, Judge]:
    """A judge for every role in `needed`.

    Raises:
        ArtifactError: a judge's model folder does not exist.
        JudgeUnavailableError: a judge's server is not ready in time.
    """
    judges: dict[str, Judge] = {}
    for role in sorted(needed):
        chosen = config.judge(role)
        if chosen is not None:
            judges[role] = build_judge(role, chosen, defer_to=defer_to, seed=seed)
    return judges


def build_judge(role: str, config: VllmModelConfig, *, defer_to: AsyncSampler | None, seed: int) -> Judge:
    """One judge: over HTTP, or a generator in this process.

    Raises:
        ArtifactError: its model folder does not exist.
        UnsupportedError: its backend is not installed, or cannot run its model.
        JudgeUnavailableError: its server does not list its models within readiness_timeout_s, or lists none.
    """
    if config.backend == "http":
        assert config.base_url is not None  # the schema requires it
        judge = HttpJudge(
            config.base_url,
            config.model or "",
            api_key_env=config.api_key_env,
            retries=config.max_retries,
            seed=seed,
        )
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
        raise _of_judge(error, role) from error
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


def _of_judge(error: UnsupportedError, role: str) -> UnsupportedError:
    """What a generator refuses, which names the keys of the policy's, with the judge's own."""
    policys, own = "policy.generation.backend=", f"{_section(role)}.backend="
    hints = [hint.replace(policys, own) for hint in error.hints]
    return UnsupportedError(
        f"judge {role}: {error.what}",
        where=(error.where or "").replace(policys, own) or None,
        expected=error.expected,
        found=error.found,
        hints=[hint for hint in hints if "policy" not in hint],
    )


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
