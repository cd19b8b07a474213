"""A GRPO run from its validated config and its prompts: every live part, and what the loop needs around them."""

from pathlib import Path

from nemotron_steps.config.layout.constraints import raise_if_ray_needed, raise_if_violated, violations
from nemotron_steps.config.layout.model_limits import teacher_violations
from nemotron_steps.config.layout.parallel_config import parallel_config_of
from nemotron_steps.config.schema.opd import OpdConfig
from nemotron_steps.config.schema.rl import RlConfig
from nemotron_steps.engine.checkpoints import CheckpointManager
from nemotron_steps.engine.grpo.loop import GrpoRun
from nemotron_steps.engine.grpo.rewards import RewardPenalties
from nemotron_steps.engine.grpo.step import Distillation, needs_reference_logprobs
from nemotron_steps.engine.losses.distillation import DistillationLoss, TeacherKl
from nemotron_steps.engine.losses.loss import Loss, SampledFrom
from nemotron_steps.engine.losses.policy_gradient import PolicyGradientLoss
from nemotron_steps.engine.memory_tuning import free_left_gpu_memory
from nemotron_steps.engine.placement.parts import Parts, Wanted, WantedTeachers, place_in_process
from nemotron_steps.engine.placement.teacher_group import teacher_config
from nemotron_steps.engine.reporting import Reporter
from nemotron_steps.engine.setup.collector import build_collector
from nemotron_steps.engine.setup.rows import RunRows, check_run_rows, prompt_stream, teacher_choice
from nemotron_steps.engine.signals import SignalMonitor
from nemotron_steps.environments.environment_set import EnvironmentSet
from nemotron_steps.errors import ConfigError
from nemotron_steps.models.architecture import facts_of, hf_folder
from nemotron_steps.models.chat import ChatFormat


def build_run(
    config: RlConfig, rows: RunRows, *, work: Path, reporter: Reporter, started: float
) -> tuple[GrpoRun, EnvironmentSet]:
    """Every part of a training run; rows are checked against their environments before anything is loaded."""
    raise_if_ray_needed(config)
    grpo = config.grpo
    needs = check_run_rows(config, rows)
    if config.policy.checkpoint is None:
        raise ConfigError("no policy to train", where="policy.checkpoint", hints=["--input policy=PATH"])
    folder = hf_folder(config.policy.checkpoint)
    chat = ChatFormat.from_folder(folder, config.policy.tokenizer.chat_template_kwargs)
    penalties = None
    if config.reward_penalties.any_enabled:
        asked = chat.render_text([{"role": "user", "content": "x"}])
        penalties = RewardPenalties.of(config.reward_penalties, config.env.nemo_gym.thinking_tags, asked, chat.encode)
    prompts = prompt_stream(config, rows.train)
    updates = grpo.num_prompts_per_step * grpo.num_generations_per_prompt // config.policy.train_global_batch_size
    wanted = Wanted(
        checkpoint=Path(config.policy.checkpoint),
        hf_folder=folder,
        chat=chat,
        loss_fn=_loss(config),
        reference=needs_reference_logprobs(config.loss_fn),
        total_steps=prompts.num_steps(grpo.max_num_steps) * updates,
        max_total_length=max(config.policy.max_total_sequence_length, config.policy.max_total_sequence_length_end or 0),
        judges=needs.judges,
        teachers=_teachers(config),
    )
    free_left_gpu_memory()
    parts = place(config, wanted)
    with parts.resources:
        reporter.event("placement", **parts.where)
        collector = build_collector(
            config.policy.generation,
            chat,
            parts.sampler,
            parts.environments,
            needs,
            seed=grpo.seed,
            max_total_length=config.policy.max_total_sequence_length,
            longest=wanted.max_total_length,
            max_turns=grpo.max_rollout_turns,
            reporter=reporter,
            resources=parts.resources,
        )
        distillation, choice = None, teacher_choice(config)
        if choice is not None and parts.teachers is not None:
            distillation = Distillation(choice, parts.teachers, gives_advantages=grpo.adv_estimator.name == "opd")
        trained_on = [name for name in needs.environments if parts.environments.get(name).name in needs.trained_on]
        grade = [parts.environments.get(name) for name in trained_on]
        alone = len(needs.trained_on) == 1 and not grpo.low_effort.enabled  # which adds to the reward
        run = GrpoRun(
            config=config,
            policy=parts.policy,
            generator=parts.generator,
            sampler=parts.sampler,
            collector=collector,
            judges=parts.judges,
            prompts=prompts,
            validation=rows.validation,
            checkpoints=CheckpointManager(work / "checkpoints", config.checkpointing, started=started),
            reporter=reporter,
            signals=SignalMonitor(
                reward_range=(grade[0].usual_range or grade[0].reward_range) if alone else None,
                max_policy_lag=grpo.async_grpo.max_trajectory_age_steps if grpo.async_grpo.enabled else None,
                stop_on=config.signals.stop_on,
            ),
            reward_penalties=penalties,
            distillation=distillation,
        )
        run.resources = parts.resources.pop_all()
    return run, parts.environments


def place(config: RlConfig, wanted: Wanted) -> Parts:
    """Load every part where `cluster` puts it."""
    sizes = parallel_config_of(config)
    raise_if_violated(violations(sizes, facts_of(wanted.hf_folder)))
    if wanted.teachers is not None:
        known = {name: facts_of(path) for name, path in wanted.teachers.checkpoints.items()}
        for each in teacher_violations(sizes, {name: facts for name, facts in known.items() if facts is not None}):
            raise_if_violated(each.violations, f"{each.teachers}: ")
    if config.cluster.backend == "ray":
        from nemotron_steps.engine.placement import on_ray

        return on_ray.place(config, wanted)
    return place_in_process(config, wanted)


def _loss(config: RlConfig) -> Loss:
    if not isinstance(config, OpdConfig) or config.grpo.adv_estimator.name == "opd":
        return PolicyGradientLoss(config.loss_fn, SampledFrom.of(config.policy.generation))
    loss = config.loss_fn
    return DistillationLoss(TeacherKl(loss.kl_type, loss.mixed_kl_weight, loss.zero_outside_topk))


def _teachers(config: RlConfig) -> WantedTeachers | None:
    if not isinstance(config, OpdConfig):
        return None
    settings = config.on_policy_distillation
    apart = settings.non_colocated_teachers
    return WantedTeachers(
        checkpoints={name: Path(folder) for name, folder in settings.teachers.items()},
        topk=0 if config.grpo.adv_estimator.name == "opd" else settings.topk_logits_k,
        offload=settings.offload,
        apart={name: teacher_config(config.policy, apart.of(name)) for name in settings.teachers if apart.enabled},
    )
