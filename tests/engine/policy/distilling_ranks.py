"""Two ranks that distil two teachers into a policy, in several layouts."""

from pathlib import Path
from typing import Any

from tests.engine.policy.ranks import run_ranks

VOCAB, K = 201, 5
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "tensor": {"tensor_model_parallel_size": 2},
    "tensor, sequence": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "context": {"context_parallel_size": 2},
}


def write_models(root: Path) -> dict[str, Path]:
    """A policy and two teachers, of which one has another shape."""
    from tests.models.checkpoints import write_checkpoint

    folders = {name: root / name for name in ("policy", "a", "b")}
    alike: dict[str, Any] = {"vocab_size": VOCAB, "num_hidden_layers": 2}
    write_checkpoint("qwen3", folders["policy"], initializer_range=0.1, **alike)
    write_checkpoint("qwen3", folders["a"], initializer_range=0.15, **alike)
    write_checkpoint(
        "qwen3", folders["b"], initializer_range=0.2, **{**alike, "num_hidden_layers": 4, "hidden_size": 96}
    )
    return folders


def names_of(batch: Any) -> list[str | None]:
    return [None if row == 3 else "ab"[row % 2] for row in range(len(batch))]  # row 3 is masked


def distilled(
    folders: dict[str, Path], change: dict[str, Any], topk: int | None = K, **megatron: Any
) -> dict[str, float]:
    """Metrics of the first step and the loss of the second."""
    from nemotron_steps.engine.losses.distillation import DistillationLoss, TeacherKl
    from nemotron_steps.engine.policy.megatron import MegatronPolicy
    from nemotron_steps.engine.policy.teachers import FrozenTeachers
    from tests.engine.policy.batches import SMOOTH, grouped_batch, policy_config

    settings = {"megatron_cfg": {"optimizer": {**SMOOTH, "lr": 1e-3}, **megatron}, **change}
    config, batch = policy_config(**settings), grouped_batch()
    named = {name: folders[name] for name in ("a", "b")}
    kl = TeacherKl("mixed", 0.3, topk is not None)
    policy = MegatronPolicy(config, folders["policy"], DistillationLoss(kl))
    scored = FrozenTeachers(policy, named, topk, offload=True).score(batch, names_of(batch))
    first, second = policy.train_step(scored), policy.train_step(scored)
    assert scored.teacher_logprobs is not None
    figures = {name: first[name] for name in ("loss", "grad_norm", "entropy", "gen_kl_error")}
    figures |= {"second": second["loss"], "teacher": float(scored.teacher_logprobs.double().sum())}
    if scored.teacher_topk_logprobs is not None:
        figures["heaviest"] = float(scored.teacher_topk_logprobs.double().sum())
    return figures


def scenarios(ranks: int, folders: dict[str, Path], out: Path) -> dict[str, Any]:
    return {
        f"{name} {topk}": distilled(folders, {"train_micro_batch_size": 3}, topk, **layout)
        for name, layout in LAYOUTS.items()
        for topk in (K, None)
    } | {"sampled": sampled(folders)}


def sampled(folders: dict[str, Path]) -> list[float]:
    """Sum of the sampled tokens' logprobs, of teachers that are asked for nothing else, in two layouts."""
    from nemotron_steps.engine.policy.megatron import MegatronPolicy
    from nemotron_steps.engine.policy.teachers import FrozenTeachers
    from tests.engine.policy.batches import grouped_batch, policy_config, rl_loss

    found, batch = [], grouped_batch()
    for layout in ("data", "tensor"):
        config = policy_config(megatron_cfg=LAYOUTS[layout])
        policy = MegatronPolicy(config, folders["policy"], rl_loss())
        named = {name: folders[name] for name in ("a", "b")}
        scored = FrozenTeachers(policy, named, 0, offload=True).score(batch, names_of(batch))
        assert scored.teacher_topk_logprobs is not None and scored.teacher_topk_logprobs.shape[2] == 0
        assert scored.teacher_logprobs is not None
        found.append(float(scored.teacher_logprobs.double().sum()))
    return found


def run_two(out: Path, folders: dict[str, Path]) -> list[dict[str, Any]]:
    return run_ranks(2, out, folders, scenarios)
