"""Everything about a layout that does not fit its model, its devices or its batch, each with what to paste."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from nemotron_steps.config.layout.model_spec import ModelSpec
from nemotron_steps.config.layout.parallel_config import (
    APART,
    CUTS,
    KEYS,
    ParallelConfig,
    TeacherLayout,
    getter,
    judge_copies,
    parallel_config_of,
    teachers_named,
)
from nemotron_steps.errors import ConfigError, UnsupportedError

_SHARED = "key-value heads"


@dataclass(frozen=True)
class Violation:
    """One constraint that a layout violates: the config key at fault, and half a sentence, for a list of several.
    `hint`: config key → a value under which this constraint is met; others may not be."""

    about: Literal["model", "devices", "batch"]
    key: str
    what: str
    expected: str
    found: str
    hint: Mapping[str, Any] = field(default_factory=dict, compare=False)


def violations(sizes: ParallelConfig, model: ModelSpec | None = None) -> list[Violation]:
    """Those of the model, else of the devices, else of the batch: what comes first causes the others."""
    found = [*model_violations(sizes, model)] if model is not None else []
    return found or [*device_violations(sizes)] or [*_batch_violations(sizes)]


def format_violations(several: Sequence[Violation]) -> tuple[str, str, str]:
    """What is wrong, what was expected and what was found, of one violation or of several in one error."""
    alike = list(dict.fromkeys(several))
    if len(alike) == 1:
        return alike[0].what, alike[0].expected, alike[0].found
    names = {each: each.key.rpartition(".")[2] for each in alike}
    expected = dict.fromkeys(f"{name}: {each.expected}" for each, name in names.items())
    found = dict.fromkeys(f"{name}: {each.found}" for each, name in names.items())
    return "; ".join(each.what for each in alike), "; ".join(expected), "; ".join(found)


def hints_of(several: Sequence[Violation]) -> tuple[str, ...]:
    """One hint that meets all these constraints, none if they have none. Of two sizes for a key each divides what it
    has to, and so does their greatest common divisor."""
    values: dict[str, Any] = {}
    for violation in several:
        for key, value in violation.hint.items():
            both = type(value) is int and type(values.get(key)) is int
            values[key] = math.gcd(values[key], value) if both else values.get(key, value)
    return overrides(values)


def overrides(values: Mapping[str, Any]) -> tuple[str, ...]:
    """A hint that sets config keys; none without any."""
    text = " ".join(f"{key}={_text(value)}" for key, value in values.items())
    return (text,) if text else ()


def raise_if_violated(found: Sequence[Violation], who: str = "") -> None:
    """ConfigError with all of these constraints and a hint, if there are any; `who` goes before what is wrong."""
    if found:
        what, expected, value = format_violations(found)
        raise ConfigError(f"{who}{what}", where=found[0].key, expected=expected, found=value, hints=hints_of(found))


def _wrong(sizes: ParallelConfig, name: str, what: str, expected: str, hint: Mapping[str, Any]) -> Violation:
    """Of the model; the hint is by fields."""
    keys = {sizes.key(each): value for each, value in hint.items()}
    return Violation("model", sizes.key(name), what, expected, _text(getattr(sizes, name)), keys)


def model_violations(sizes: ParallelConfig, model: ModelSpec) -> Iterator[Violation]:
    """What the policy and its generators cannot cut evenly over their ranks, or cannot do with this model."""
    if sizes.model_type not in (None, model.model_type):
        what = f"the config is for {sizes.model_type} models"
        yield _wrong(sizes, "model_type", what, f"null, or {model.model_type}", {"model_type": None})
    if not sizes.dtensor:
        yield from _megatron_violations(sizes, model)
    elif sizes.tensor > 1 and (model.is_moe or model.is_hybrid):
        what = f"the dtensor policy does not cut {'experts' if model.is_moe else 'hybrid models'} over ranks"
        yield _wrong(sizes, "tensor", what, "1", {"tensor": 1})
    else:
        heads, rows = (model.key_value_heads, _SHARED), (model.mlp_width, "rows of the MLP")
        yield from _undivided(sizes, ("tensor", *heads), ("tensor", *rows))
    if sizes.uses_vllm:
        yield from _generator_violations(sizes, model)
    for name in ("length", "length_end", "new_tokens"):
        length = getattr(sizes, name)
        if model.positions is not None and length is not None and length > model.positions:
            what = f"{KEYS[name].rpartition('.')[2]}={length} is more than the positions of the model"
            grows = {"length_end": None} if name == "length" and sizes.length_end is not None else {}
            yield _wrong(sizes, name, what, f"at most {model.positions}", {name: model.positions, **grows})


def _megatron_violations(sizes: ParallelConfig, model: ModelSpec) -> Iterator[Violation]:
    heads, shared, width = model.attention_heads, model.key_value_heads, model.head_dim
    rows = None
    if heads is not None and shared is not None and width is not None:
        rows = (heads + 2 * shared) * width
    yield from _undivided(
        sizes,
        ("tensor", heads, "attention heads"),
        ("tensor", shared, _SHARED, True),
        ("tensor", rows, "rows of queries, keys and values"),
    )
    if not model.is_hybrid:
        yield from _undivided(sizes, ("pipeline", model.layers, "layers"))
    elif model.layers is not None and model.layers < sizes.pipeline:
        what = f"pipeline_model_parallel_size={sizes.pipeline} is more than the {model.layers} layers of the model"
        fix = _divisor(sizes.pipeline, model.layers)
        yield _wrong(sizes, "pipeline", what, f"at most {model.layers}", {"pipeline": fix})
    if sizes.mtp_layers and model.mtp_layers is not None:
        yield from _mtp_violations(sizes, model.mtp_layers)
    if model.mamba_heads is not None and model.mamba_groups is not None:
        # Mamba-2 is cut by heads. A group of them goes to one tensor-parallel rank, or stays with others on it; context
        # parallel ranks may share a group, which they then all have.
        own_heads, own_groups = model.mamba_heads // sizes.tensor, model.mamba_groups // sizes.tensor
        both = max(1, math.gcd(model.mamba_heads, model.mamba_groups))
        yield from _undivided(
            sizes,
            ("tensor", both, "Mamba heads and their groups"),
            ("context", own_heads, "Mamba heads of a tensor-parallel rank"),
            ("context", own_groups, "Mamba groups of a tensor-parallel rank", True),
        )
    if not model.is_moe:
        yield from _undivided(sizes, ("tensor", model.mlp_width, "rows of the MLP"))
        if sizes.expert > 1:
            yield _wrong(sizes, "expert", "expert parallelism needs a mixture of experts", "1", {"expert": 1})
        if sizes.router_replay:
            what = "router replay needs a mixture of experts"
            yield _wrong(sizes, "router_replay", what, "false", {"router_replay": False})
        return
    yield from _undivided(sizes, ("tensor", model.shared_width, "rows of the shared expert"))
    yield from _undivided(sizes, ("expert", model.experts, "experts"))
    if sizes.tensor > 1 and not sizes.sequence_parallel:
        what = "a mixture of experts under tensor parallelism needs sequence parallelism"
        yield _wrong(sizes, "sequence_parallel", what, "true", {"sequence_parallel": True})
    if sizes.samples and sizes.router_bias_update_rate and not model.is_hybrid:
        what = "no generator knows the biases of experts that would balance this policy's load"
        name = "router_bias_update_rate"
        yield _wrong(sizes, name, what, "0 where rollouts are sampled", {name: 0.0})


def _mtp_violations(sizes: ParallelConfig, blocks: int) -> Iterator[Violation]:
    """A depth of multi-token prediction is one block of the checkpoint's, or all depths are one block."""
    if not blocks:
        what = "the model has no block of multi-token prediction that could be trained"
        yield _wrong(sizes, "mtp_layers", what, "0", {"mtp_layers": 0})
    elif sizes.mtp_repeated and blocks > 1:
        what = f"one block is repeated, and the model has {blocks}"
        yield _wrong(sizes, "mtp_repeated", what, "false", {"mtp_repeated": False, "mtp_layers": blocks})
    elif not sizes.mtp_repeated and sizes.mtp_layers != blocks:
        what = "the model has not as many blocks as depths of multi-token prediction are trained"
        fix = {"mtp_repeated": True} if blocks == 1 else {"mtp_layers": blocks}
        yield _wrong(sizes, "mtp_layers", what, f"{blocks}, or one that is repeated", fix)


def _generator_violations(sizes: ParallelConfig, model: ModelSpec) -> Iterator[Violation]:
    """vLLM cuts attention by heads; it repeats key-value heads where there are more ranks than those,
    but of Mamba-2's groups only a single one."""
    name, whole = "generator_width", sizes.generator_experts > 1
    if model.bounds_time_steps:
        what = "vLLM leaves out the time_step_limit that bounds the time steps of this model"
        alone = _width_of(sizes, 1) if sizes.generator_width > 1 else {}
        hint = {sizes.key(each): value for each, value in {"uses_vllm": "embedded", **alone}.items()}
        yield Violation("model", sizes.key("uses_vllm"), what, "embedded", "vllm", hint)
    yield from _undivided(
        sizes,
        (name, model.attention_heads, "attention heads (vLLM)"),
        (name, model.key_value_heads, f"{_SHARED} (vLLM)", True),
        (name, model.mamba_heads, "Mamba heads (vLLM)"),
        (name, None if model.mamba_groups == 1 else model.mamba_groups, "groups of Mamba heads (vLLM)"),
        (name, None if whole else model.mlp_width, "rows of the MLP (vLLM)"),
        (name, model.shared_width, "rows of the shared expert (vLLM)"),
    )


def _undivided(sizes: ParallelConfig, *cuts: tuple[Any, ...]) -> Iterator[Violation]:
    """The first cut that does not divide what the model has: (field, count, of what, whether a multiple will do). The
    hint is the next smaller one that does: of TP also within a node, or among the processes on CPU; of vLLM, whose
    width several models may share, one that still divides what the width did."""
    for name, count, of, *multiple in cuts:
        size = getattr(sizes, name)
        if count is None or count % size == 0 or (multiple and size % count == 0):
            continue
        also = {"tensor": sizes.gpus_per_node or sizes.workers or 0, "generator_width": size}
        fix = _divisor(math.gcd(count, also.get(name, 0)), size)
        what = f"{sizes.key(name).rpartition('.')[2]}={size} does not divide {count} {of}"
        hint = _width_of(sizes, fix) if name == "generator_width" else {name: fix}
        yield _wrong(sizes, name, what, f"a divisor {'or multiple ' if multiple else ''}of {count}", hint)
        return


def _divisor(count: int, most: int) -> int:
    """The largest divisor of a count that is not above `most`."""
    return next(size for size in range(min(count, most), 0, -1) if count % size == 0)


def _width_of(sizes: ParallelConfig, size: int) -> dict[str, int]:
    """Another width of generators: their experts are spread over it or not at all."""
    return {"generator_width": size, **({"generator_experts": size} if sizes.generator_experts > 1 else {})}


def device_violations(sizes: ParallelConfig) -> Iterator[Violation]:
    """What does not divide the GPUs, or the policy's processes on CPU."""
    per_node, nodes = sizes.gpus_per_node, KEYS["nodes"]
    if not per_node:
        if sizes.backend == "ray":
            whole = math.lcm(sizes.copy_size, sizes.pipeline * sizes.expert)
            fix = {KEYS["workers"]: -(-sizes.ranks // whole) * whole}
            on = f"the {_count(sizes.ranks, 'policy rank')} on CPU"
            yield from _cut_violations(sizes, sizes.ranks, 0, KEYS["workers"], on, hint=fix)
            yield from _whole_generators(sizes)
        return
    if sizes.judge_nodes and sizes.judge_nodes >= sizes.nodes:
        what = f"judges take {sizes.judge_nodes} of {_count(sizes.nodes, 'node')}, and none is left for the policy"
        hint = {nodes: sizes.judge_nodes + 1}
        yield Violation("devices", KEYS["judge_nodes"], what, f"less than {nodes}", str(sizes.judge_nodes), hint)
        return
    yield from _teacher_devices(sizes)
    if sizes.gpus < 1:
        there, taken = sizes.gpus + sizes.teaching, _count(sizes.teaching, "GPU")
        what = f"teachers take {taken} of {there}, and none is left for the policy"
        hint = {nodes: sizes.judge_nodes + sizes.teaching // per_node + 1}
        yield Violation("devices", nodes, what, f"more than {taken}", _count(there, "GPU"), hint)
        return
    key = KEYS["generation_devices"]
    if sizes.ranks < 1:
        what = f"generation takes {_count(sizes.separate, 'GPU')} of {sizes.gpus}, and none is left for training"
        half = sizes.gpus // 2 // sizes.generator_width * sizes.generator_width
        more = sizes.nodes + (sizes.separate - sizes.gpus) // per_node + 1
        expected, hint = f"fewer than {_count(sizes.gpus, 'GPU')}", {key: half} if half else {nodes: more}
        yield Violation("devices", key, what, expected, str(sizes.separate), hint)
        return
    if sizes.workers not in (None, sizes.ranks):
        key, what = KEYS["workers"], "on GPUs the number of policy ranks follows from the devices"
        yield Violation("devices", key, what, f"null, or {sizes.ranks}", str(sizes.workers), {key: None})
    on = f"the {_count(sizes.ranks, 'GPU')} that train"
    yield from _cut_violations(sizes, sizes.ranks, per_node, nodes, on)
    if sizes.samples:
        yield from _generator_devices(sizes)
    if sizes.judges:
        yield from _judge_devices(sizes)


def _cut_violations(
    cuts: ParallelConfig | TeacherLayout,
    ranks: int,
    per_node: int,
    key: str,
    among: str,
    who: str = "",
    hint: Mapping[str, Any] | None = None,
) -> Iterator[Violation]:
    """What of a layout does not divide its ranks, which `key` counts and `among` calls. Tensor-parallel ranks exchange
    activations in every layer, which is for NVLink: they are on one node."""
    tensor, expert, stage = cuts.tensor, cuts.expert, ranks // cuts.pipeline
    if per_node and per_node % tensor:
        key, there = cuts.key("tensor"), _count(per_node, "GPU")
        what = f"{key.rpartition('.')[2]}={tensor}{who} does not divide the {there} of a node"
        fix = {key: math.gcd(tensor, per_node)}
        yield Violation("devices", key, what, f"a divisor of {per_node}", str(tensor), fix)
    elif ranks % cuts.copy_size:
        sizes = {"TP": tensor, "PP": cuts.pipeline, "CP": cuts.context}
        product = "×".join(name for name, size in sizes.items() if size > 1)
        dividing, left = {}, ranks  # each is what of it divides what those before leave
        for name in CUTS[:3]:
            size = math.gcd(getattr(cuts, name), left)
            left //= size
            if size != getattr(cuts, name):
                dividing[cuts.key(name)] = size
        what = f"{product}={cuts.copy_size}{who} does not divide {among}"
        found = _count(ranks, "GPU" if per_node else "rank")
        yield Violation("devices", key, what, f"a multiple of {cuts.copy_size}", found, hint or dividing)
    elif stage % expert:
        key, of = cuts.key("expert"), "GPUs" if per_node else "ranks"
        what = f"expert_model_parallel_size={expert}{who} does not divide the {stage} {of} of a pipeline stage"
        fix = {key: math.gcd(expert, stage)}
        yield Violation("devices", key, what, f"a divisor of {stage}", str(expert), fix)


def _teacher_devices(sizes: ParallelConfig) -> Iterator[Violation]:
    """Of teachers that have devices of their own; once for all that take their layout from the same section."""
    alike: dict[TeacherLayout, list[str]] = {}
    for teacher in sizes.teachers:
        alike.setdefault(replace(teacher, name=""), []).append(teacher.name)
    for teacher, names in alike.items():
        limit, key, who = sizes.gpus_per_node, teacher.key("gpus_per_node"), f" of {teachers_named(names)}"
        per_node, ranks = teacher.gpus_per_node or limit, teacher.ranks(limit)
        if per_node > limit:
            what = f"gpus_per_node={per_node}{who} is more than a node has"
            yield Violation("devices", key, what, f"at most {limit}", str(per_node), {key: limit})
            continue
        yield from _cut_violations(teacher, ranks, per_node, key, f"their {_count(ranks, 'GPU')}", who)


def _whole_generators(sizes: ParallelConfig) -> Iterator[Violation]:
    width, key = sizes.generator_width, KEYS["generation_devices"]
    if sizes.separate % width:
        what = f"{_count(sizes.separate, 'device')} that generate do not make whole generators of {width}"
        hint = {key: max(1, sizes.separate // width) * width}
        expected = f"a multiple of {KEYS['generator_width']}={width}"
        yield Violation("devices", key, what, expected, str(sizes.separate), hint)


def _generator_devices(sizes: ParallelConfig) -> Iterator[Violation]:
    """A generator's GPUs are on one node, and the GPUs that generate make whole generators."""
    width, available, per_node = sizes.generator_width, sizes.generating, sizes.gpus_per_node
    limit = min(available, per_node)
    if width <= limit and sizes.separate % width:
        yield from _whole_generators(sizes)
        return
    if width > limit:
        what = f"a generator of {_count(width, 'GPU')} needs more than the {limit} that generate on a node"
        expected = f"at most {limit}"
    elif available % width or per_node % width:
        what = f"generators of {_count(width, 'GPU')} do not divide the {available} that generate"
        expected = f"a divisor of {_count(available, 'GPU')}, and of {per_node} on a node"
    else:
        return
    smaller = _width_of(sizes, math.gcd(width, available, per_node))
    hint = {KEYS[name]: size for name, size in smaller.items()}
    yield Violation("devices", KEYS["generator_width"], what, expected, str(width), hint)


def _judge_devices(sizes: ParallelConfig) -> Iterator[Violation]:
    """Local judges that the GPUs kept for them, or those they share with generators, do not hold."""
    per_node, key = sizes.gpus_per_node, KEYS["judge_nodes"]
    wide = next((judge for judge in sizes.judges if judge.width > (per_node if sizes.judge_nodes else 1)), None)
    if wide is not None:
        what = f"{wide.role} takes several GPUs, which needs nodes that are kept for judges"
        expected, fix = f"{key}=1 or more", 1
        if sizes.judge_nodes:
            what, expected, fix = f"{wide.role} takes more GPUs than a node has", f"at most {per_node}", per_node
        key = f"{wide.section}.tensor_parallel_size"
        yield Violation("devices", key, what, expected, str(wide.width), {key: math.gcd(wide.width, fix)})
        return
    copies = judge_copies(sizes, sizes.judges)
    needed = sum(copies[judge.role] * judge.width for judge in sizes.judges)
    if sizes.judge_nodes and needed > sizes.judge_nodes * per_node:
        counted = ", ".join(f"{count} x {role}" for role, count in copies.items())
        found = f"{_count(sizes.judge_nodes, 'node')} of {_count(per_node, 'GPU')}"
        nodes = -(-needed // per_node)
        hint = {key: nodes, KEYS["nodes"]: sizes.nodes + nodes - sizes.judge_nodes}
        what = "the nodes kept for judges have too few GPUs for them"
        yield Violation("devices", key, what, f"{_count(needed, 'GPU')} for {counted}", found, hint)


def _batch_violations(sizes: ParallelConfig) -> Iterator[Violation]:
    """Rollouts of a step fill whole training batches, exactly one under force_on_policy_ratio, and a batch splits over
    the copies of the model. The hint: the nearest batch that does; prompts change only where no batch of theirs does.
    """
    batch, rollouts, copies = sizes.batch, sizes.rollouts, sizes.data_parallel or 1
    if batch is None or batch < 1:
        return
    product = f"num_prompts_per_step {sizes.prompts} × num_generations_per_prompt {sizes.group} = {rollouts}"
    key = KEYS["batch"]
    if rollouts is not None and sizes.on_policy and batch != rollouts:
        what, expected = "loss_fn.force_on_policy_ratio needs one update per step", f"{key} = {product}"
    elif rollouts is not None and rollouts % batch:
        what, expected = "the rollouts of a step do not fill whole training batches", f"{key} that divides {product}"
    elif batch % copies:
        what, expected = f"{copies} data-parallel ranks do not divide the training batch", f"a multiple of {copies}"
    else:
        return
    hint = {key: max(1, round(batch / copies)) * copies}
    if rollouts is not None:
        whole = [size for size in range(copies, rollouts + 1, copies) if rollouts % size == 0]
        nearest = min(whole, key=lambda size: abs(math.log(size / batch)), default=0)
        hint = {key: rollouts if sizes.on_policy else nearest}
        if not whole or (sizes.on_policy and rollouts % copies):
            of = copies // math.gcd(copies, sizes.group or 1)
            prompts = max(1, round((sizes.prompts or 1) / of)) * of
            hint = {key: prompts * (sizes.group or 1), KEYS["prompts"]: prompts}
    yield Violation("batch", key, what, expected, str(batch), hint)


def raise_if_ray_needed(config: Any) -> None:
    """UnsupportedError for `cluster.backend=process` with settings that one process cannot follow, never ignored."""
    get, sizes = getter(config), parallel_config_of(config)
    if sizes.backend != "process":
        return
    without = [] if sizes.colocated else [f"{KEYS['colocated']}=true"]
    if get(f"{APART}.enabled") is True:
        without.append(f"{APART}.enabled=false")
    without += [f"{judge.section}.replicas=1" for judge in sizes.judges if (judge.replicas or 1) > 1]
    for name in ("workers", "nodes", "gpus_per_node", *CUTS):
        if (getattr(sizes, name) or 1) > 1:
            without.append(f"{sizes.key(name)}=1")
    if get("cluster.ray_address") is not None:
        without.append("cluster.ray_address=null")
    if without:
        raise UnsupportedError(
            "several policy ranks, a model split over ranks, separate devices and several nodes need Ray",
            where=", ".join(override.partition("=")[0] for override in without),
            expected="cluster.backend=ray",
            found="cluster.backend=process",
            hints=["cluster.backend=ray", " ".join(without)],
        )


def _count(number: int, of: str) -> str:
    return f"{number} {of}{'' if number == 1 else 's'}"


def _text(value: Any) -> str:
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value).lower()
