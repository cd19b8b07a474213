"""Everything about a layout that does not divide its model, its devices or its batch, each with what to paste."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from nemotron_steps.config.layout.model_spec import ModelSpec
from nemotron_steps.config.layout.parallel_config import (
    KEYS,
    JudgeLayout,
    ParallelConfig,
    TeacherLayout,
    judge_copies,
    key_of,
    teachers_named,
)
from nemotron_steps.errors import ConfigError

_SHARED = "key-value heads"
_LENGTHS = ("length", "length_end", "new_tokens")
_CUTS = ("tensor", "pipeline", "context", "expert", "generator_width")
"""Fields of `ParallelConfig` that count positions, and that say over how many ranks a model is cut."""


@dataclass(frozen=True)
class Violation:
    """One constraint that a layout violates.

    Attributes:
        about: what the layout does not fit.
        key: the config key at fault.
        what: half a sentence, for a list of several.
        expected, found: of that key, or of what it makes.
        hint: config key → a value under which this constraint is met; others may not be.
    """

    about: Literal["model", "devices", "batch"]
    key: str
    what: str
    expected: str
    found: str
    hint: Mapping[str, Any] = field(default_factory=dict, compare=False)


def violations(sizes: ParallelConfig, model: ModelSpec | None = None, wrong: Collection[str] = ()) -> list[Violation]:
    """All of them but consequences of others: a cut that the model has not does not divide devices either, and ranks
    that a wrong layout makes have no batch to split. `wrong`: keys of cuts that are wrong anyway, for teachers' models.
    """
    of_model = list(model_violations(sizes, model)) if model is not None else []
    wrong = {*wrong, *(each.key for each in of_model)}
    devices = list(device_violations(sizes))
    if devices and wrong:
        uncut: dict[str, Any] = {cut: 1 for cut in _CUTS if key_of(cut, sizes.dtensor) in wrong}
        teachers = []
        for teacher in sizes.teachers:
            own: dict[str, Any] = {cut: 1 for cut in _CUTS[:4] if teacher.key(cut) in wrong}
            teachers.append(replace(teacher, **own))
        causes = {each.key for each in device_violations(replace(sizes, teachers=tuple(teachers), **uncut))}
        devices = [each for each in devices if each.key in causes]
    found = [*of_model, *devices]
    return [*found, *batch_violations(sizes, None if found else sizes.data_parallel)]


def format_violations(several: Sequence[Violation]) -> tuple[str, str, str]:
    """What is wrong, what was expected and what was found, of one violation or of several in one error."""
    alike = list(dict.fromkeys(several))
    if len(alike) == 1:
        return alike[0].what, alike[0].expected, alike[0].found
    names = [each.key.rpartition(".")[2] for each in alike]
    expected = dict.fromkeys(f"{name}: {each.expected}" for name, each in zip(names, alike, strict=True))
    found = dict.fromkeys(f"{name}: {each.found}" for name, each in zip(names, alike, strict=True))
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
    """Raise ConfigError with all of these constraints and a hint, if there are any; `who` goes before what is wrong."""
    if found:
        what, expected, value = format_violations(found)
        raise ConfigError(f"{who}{what}", where=found[0].key, expected=expected, found=value, hints=hints_of(found))


def model_violations(sizes: ParallelConfig, model: ModelSpec) -> Iterator[Violation]:
    """What the policy and its generators cannot cut evenly over their ranks, or cannot do with this model."""
    if sizes.model_type not in (None, model.model_type):
        what = f"the config is for {sizes.model_type} models"
        yield _of_model("model_type", what, str(sizes.model_type), model.model_type, None)
    yield from _dtensor_violations(sizes, model) if sizes.dtensor else _megatron_violations(sizes, model)
    if sizes.uses_vllm:
        yield from _generator_violations(sizes, model)
    for name in _LENGTHS:
        length = getattr(sizes, name)
        if model.positions is not None and length is not None and length > model.positions:
            what = f"{KEYS[name].rpartition('.')[2]}={length} is more than the positions of the model"
            violation = _of_model(name, what, f"at most {model.positions}", str(length), model.positions)
            grows = name == "length" and sizes.length_end is not None
            yield replace(violation, hint={**violation.hint, KEYS["length_end"]: None}) if grows else violation


def _of_model(name: str, what: str, expected: str, found: str, fix: Any) -> Violation:
    return Violation("model", KEYS[name], what, expected, found, {KEYS[name]: fix})


def _megatron_violations(sizes: ParallelConfig, model: ModelSpec) -> Iterator[Violation]:
    heads, shared, width = model.attention_heads, model.key_value_heads, model.head_dim
    whole = heads is not None and shared is not None and width is not None
    rows = (heads + 2 * shared) * width if whole else None  # type: ignore[operator]
    of_rows = "rows of queries, keys and values"
    yield from _undivided(
        sizes, ("tensor", heads, "attention heads"), ("tensor", shared, _SHARED, True), ("tensor", rows, of_rows)
    )
    if not model.is_hybrid:
        yield from _undivided(sizes, ("pipeline", model.layers, "layers"))
    elif model.layers is not None and model.layers < sizes.pipeline:
        what = f"pipeline_model_parallel_size={sizes.pipeline} is more than the {model.layers} layers of the model"
        fix = _divisor(sizes.pipeline, model.layers)
        yield _of_model("pipeline", what, f"at most {model.layers}", str(sizes.pipeline), fix)
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
            yield _of_model("expert", "expert parallelism needs a mixture of experts", "1", str(sizes.expert), 1)
        if sizes.router_replay:
            yield _of_model("router_replay", "router replay needs a mixture of experts", "false", "true", False)
        return
    yield from _undivided(sizes, ("tensor", model.shared_width, "rows of the shared expert"))
    yield from _undivided(sizes, ("expert", model.experts, "experts"))
    if sizes.tensor > 1 and not sizes.sequence_parallel:
        what = "a mixture of experts under tensor parallelism needs sequence parallelism"
        yield _of_model("sequence_parallel", what, "true", "false", True)
    if sizes.samples and sizes.router_bias_update_rate and not model.is_hybrid:
        what = "no generator knows the biases of experts that would balance this policy's load"
        found = f"{sizes.router_bias_update_rate:g}"
        yield _of_model("router_bias_update_rate", what, "0 where rollouts are sampled", found, 0.0)


def _mtp_violations(sizes: ParallelConfig, blocks: int) -> Iterator[Violation]:
    """A depth of multi-token prediction is one block of the checkpoint's, or all depths are one block."""
    layers, repeated, depths = KEYS["mtp_layers"], KEYS["mtp_repeated"], str(sizes.mtp_layers)
    if not blocks:
        what = "the model has no block of multi-token prediction that could be trained"
        yield Violation("model", layers, what, "0", depths, {layers: 0})
    elif sizes.mtp_repeated and blocks > 1:
        what = f"one block is repeated, and the model has {blocks}"
        yield Violation("model", repeated, what, "false", "true", {repeated: False, layers: blocks})
    elif not sizes.mtp_repeated and sizes.mtp_layers != blocks:
        what = "the model has not as many blocks as depths of multi-token prediction are trained"
        expected = f"{blocks}, or {repeated}=true" if blocks == 1 else str(blocks)
        yield Violation("model", layers, what, expected, depths, {repeated: True} if blocks == 1 else {layers: blocks})


def _dtensor_violations(sizes: ParallelConfig, model: ModelSpec) -> Iterator[Violation]:
    if sizes.tensor > 1 and (model.is_moe or model.is_hybrid):
        key = key_of("tensor", sizes.dtensor)
        what = f"the dtensor policy does not cut {'experts' if model.is_moe else 'hybrid models'} over ranks"
        yield Violation("model", key, what, "1", str(sizes.tensor), {key: 1})
        return
    yield from _undivided(
        sizes, ("tensor", model.key_value_heads, _SHARED), ("tensor", model.mlp_width, "rows of the MLP")
    )


def _generator_violations(sizes: ParallelConfig, model: ModelSpec) -> Iterator[Violation]:
    """vLLM cuts attention by heads; it repeats key-value heads where there are more ranks than those,
    but of Mamba-2's groups only a single one."""
    if model.bounds_time_steps:
        what = "vLLM leaves out the time_step_limit that bounds the time steps of this model"
        alone = _cut_to("generator_width", sizes, 1) if sizes.generator_width > 1 else {}
        yield Violation("model", KEYS["uses_vllm"], what, "embedded", "vllm", {KEYS["uses_vllm"]: "embedded", **alone})
    name, whole = "generator_width", sizes.generator_experts > 1
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
        key, size = key_of(name, sizes.dtensor), getattr(sizes, name)
        if count is None or count % size == 0 or (multiple and size % count == 0):
            continue
        also = {"tensor": sizes.gpus_per_node or sizes.workers or 0, "generator_width": size}
        fix = _cut_to(name, sizes, _divisor(math.gcd(count, also.get(name, 0)), size))
        what = f"{key.rpartition('.')[2]}={size} does not divide {count} {of}"
        expected = f"a divisor {'or multiple ' if multiple else ''}of {count}"
        yield Violation("model", key, what, expected, str(size), fix)
        return


def _divisor(count: int, most: int) -> int:
    """The largest divisor of a count that is not above `most`."""
    return next(size for size in range(min(count, most), 0, -1) if count % size == 0)


def _cut_to(name: str, sizes: ParallelConfig, size: int) -> dict[str, Any]:
    """Another size of a cut; the experts of a generator are spread over its width or not at all."""
    along = [KEYS["generator_experts"]] if name == "generator_width" and sizes.generator_experts > 1 else []
    return dict.fromkeys([key_of(name, sizes.dtensor), *along], size)


def device_violations(sizes: ParallelConfig) -> Iterator[Violation]:
    """What does not divide the GPUs, or the policy's processes on CPU."""
    per_node, nodes = sizes.gpus_per_node, KEYS["nodes"]
    if not per_node:
        if sizes.backend == "ray":
            whole = math.lcm(sizes.copy_size, sizes.pipeline * sizes.expert)
            fix = {KEYS["workers"]: -(-sizes.ranks // whole) * whole}
            on = f"the {_count(sizes.ranks, 'policy rank')} on CPU"
            yield from _cut_violations(sizes, sizes.ranks, 0, KEYS["workers"], on, str(sizes.ranks), hint=fix)
            yield from _whole_generators(sizes)
        return
    if sizes.judge_nodes and sizes.judge_nodes >= sizes.nodes:
        what = f"judges take {sizes.judge_nodes} of {_count(sizes.nodes, 'node')}, and none is left for the policy"
        hint = {nodes: sizes.judge_nodes + 1}
        yield _of_devices(KEYS["judge_nodes"], what, f"less than {nodes}", str(sizes.judge_nodes), hint)
        return
    yield from _teacher_violations(sizes)
    if sizes.gpus < 1:
        there, taken = _count(sizes.gpus + sizes.teaching, "GPU"), _count(sizes.teaching, "GPU")
        what = f"teachers take {taken} of {sizes.gpus + sizes.teaching}, and none is left for the policy"
        hint = {nodes: sizes.judge_nodes + sizes.teaching // per_node + 1}
        yield _of_devices(nodes, what, f"more than {taken}", there, hint)
        return
    if sizes.ranks < 1:
        what = f"generation takes {_count(sizes.separate, 'GPU')} of {sizes.gpus}, and none is left for training"
        half = sizes.gpus // 2 // sizes.generator_width * sizes.generator_width
        more = sizes.nodes + (sizes.separate - sizes.gpus) // per_node + 1
        hint = {KEYS["generation_devices"]: half} if half else {nodes: more}
        expected = f"fewer than {_count(sizes.gpus, 'GPU')}"
        yield _of_devices(KEYS["generation_devices"], what, expected, str(sizes.separate), hint)
        return
    if sizes.workers not in (None, sizes.ranks):
        what = "on GPUs the number of policy ranks follows from the devices"
        expected, found = f"null, or {sizes.ranks}", str(sizes.workers)
        yield _of_devices(KEYS["workers"], what, expected, found, {KEYS["workers"]: None})
    found = _count(sizes.ranks, "GPU")
    yield from _cut_violations(sizes, sizes.ranks, per_node, nodes, f"the {found} that train", found)
    yield from _generator_devices(sizes)
    yield from judge_violations(sizes, sizes.judges)


def _of_devices(key: str, what: str, expected: str, found: str, hint: Mapping[str, Any]) -> Violation:
    return Violation("devices", key, what, expected, found, hint)


def _cut_violations(
    cuts: ParallelConfig | TeacherLayout,
    ranks: int,
    per_node: int,
    key: str,
    among: str,
    found: str,
    who: str = "",
    hint: Mapping[str, Any] | None = None,
) -> Iterator[Violation]:
    """What of a layout does not divide its ranks, which `key` counts and `among` calls. Tensor-parallel ranks exchange
    activations in every layer, which is for NVLink: they are on one node."""

    def key_at(name: str) -> str:
        return cuts.key(name) if isinstance(cuts, TeacherLayout) else key_of(name, cuts.dtensor)

    tensor, expert, stage = cuts.tensor, cuts.expert, ranks // cuts.pipeline
    if per_node and per_node % tensor:
        key = key_at("tensor")
        name, there = key.rpartition(".")[2], _count(per_node, "GPU")
        what, fix = f"{name}={tensor}{who} does not divide the {there} of a node", {key: math.gcd(tensor, per_node)}
        yield _of_devices(key, what, f"a divisor of {per_node}", str(tensor), fix)
    elif ranks % cuts.copy_size:
        sizes = {"TP": tensor, "PP": cuts.pipeline, "CP": cuts.context}
        product = "×".join(name for name, size in sizes.items() if size > 1)
        dividing, left = {}, ranks  # each is what of it divides what those before leave
        for name in ("tensor", "pipeline", "context"):
            size = math.gcd(getattr(cuts, name), left)
            left //= size
            if size != getattr(cuts, name):
                dividing[key_at(name)] = size
        what = f"{product}={cuts.copy_size}{who} does not divide {among}"
        yield _of_devices(key, what, f"a multiple of {cuts.copy_size}", found, hint or dividing)
    elif stage % expert:
        of = "GPUs" if per_node else "ranks"
        what = f"expert_model_parallel_size={expert}{who} does not divide the {stage} {of} of a pipeline stage"
        fix = {key_at("expert"): math.gcd(expert, stage)}
        yield _of_devices(key_at("expert"), what, f"a divisor of {stage}", str(expert), fix)


def _teacher_violations(sizes: ParallelConfig) -> Iterator[Violation]:
    """Of teachers that have devices of their own; once for all that take their layout from the same section."""
    alike: dict[TeacherLayout, list[str]] = {}
    for teacher in sizes.teachers:
        alike.setdefault(replace(teacher, name=""), []).append(teacher.name)
    for teacher, names in alike.items():
        limit, key, who = sizes.gpus_per_node, teacher.key("gpus_per_node"), f" of {teachers_named(names)}"
        per_node, ranks = teacher.gpus_per_node or limit, teacher.ranks(limit)
        if per_node > limit:
            what = f"gpus_per_node={per_node}{who} is more than a node has"
            yield _of_devices(key, what, f"at most {limit}", str(per_node), {key: limit})
            continue
        found = _count(ranks, "GPU")
        yield from _cut_violations(teacher, ranks, per_node, key, f"their {found}", found, who)


def _whole_generators(sizes: ParallelConfig) -> Iterator[Violation]:
    width, key = sizes.generator_width, KEYS["generation_devices"]
    if sizes.separate % width:
        what = f"{_count(sizes.separate, 'device')} that generate do not make whole generators of {width}"
        hint = {key: max(1, sizes.separate // width) * width}
        yield _of_devices(key, what, f"a multiple of {KEYS['generator_width']}={width}", str(sizes.separate), hint)


def _generator_devices(sizes: ParallelConfig) -> Iterator[Violation]:
    """A generator's GPUs are on one node, and the GPUs that generate make whole generators."""
    width, available, per_node = sizes.generator_width, sizes.generating, sizes.gpus_per_node
    if not sizes.samples:
        return
    key, limit = KEYS["generator_width"], min(available, per_node)
    smaller = _cut_to("generator_width", sizes, math.gcd(width, available, per_node))
    if width > limit:
        what = f"a generator of {_count(width, 'GPU')} needs more than the {limit} that generate on a node"
        yield _of_devices(key, what, f"at most {limit}", str(width), smaller)
    elif sizes.separate % width:
        yield from _whole_generators(sizes)
    elif available % width or per_node % width:
        what = f"generators of {_count(width, 'GPU')} do not divide the {available} that generate"
        expected = f"a divisor of {_count(available, 'GPU')}, and of {per_node} on a node"
        yield _of_devices(key, what, expected, str(width), smaller)


def judge_violations(sizes: ParallelConfig, judges: Sequence[JudgeLayout]) -> Iterator[Violation]:
    """Local judges that the GPUs kept for them, or those they share with generators, do not hold."""
    per_node = sizes.gpus_per_node
    wide = next((judge for judge in judges if judge.width > (per_node if sizes.judge_nodes else 1)), None)
    if not per_node or not judges:
        return
    if wide is not None:
        key = f"{wide.section}.tensor_parallel_size"
        what = f"{wide.role} takes several GPUs, which needs nodes that are kept for judges"
        expected, fix = f"{KEYS['judge_nodes']}=1 or more", 1
        if sizes.judge_nodes:
            what, expected, fix = f"{wide.role} takes more GPUs than a node has", f"at most {per_node}", per_node
        yield _of_devices(key, what, expected, str(wide.width), {key: math.gcd(wide.width, fix)})
        return
    copies = judge_copies(sizes, tuple(judges))
    needed = sum(copies[judge.role] * judge.width for judge in judges)
    if sizes.judge_nodes and needed > sizes.judge_nodes * per_node:
        counted = ", ".join(f"{count} x {role}" for role, count in copies.items())
        found = f"{_count(sizes.judge_nodes, 'node')} of {_count(per_node, 'GPU')}"
        nodes = -(-needed // per_node)
        hint = {KEYS["judge_nodes"]: nodes, KEYS["nodes"]: sizes.nodes + nodes - sizes.judge_nodes}
        what = "the nodes kept for judges have too few GPUs for them"
        yield _of_devices(KEYS["judge_nodes"], what, f"{_count(needed, 'GPU')} for {counted}", found, hint)


def batch_violations(sizes: ParallelConfig, copies: int | None) -> Iterator[Violation]:
    """Rollouts of a step fill whole training batches, exactly one under force_on_policy_ratio, and a batch splits over
    the copies of the model, where their number is known."""
    batch, rollouts = sizes.batch, sizes.rollouts
    if batch is None or batch < 1:
        return
    product = f"num_prompts_per_step {sizes.prompts} × num_generations_per_prompt {sizes.group} = {rollouts}"
    key = KEYS["batch"]
    if rollouts is not None and sizes.on_policy and batch != rollouts:
        what, expected = "loss_fn.force_on_policy_ratio needs one update per step", f"{key} = {product}"
    elif rollouts is not None and rollouts % batch:
        what, expected = "the rollouts of a step do not fill whole training batches", f"{key} that divides {product}"
    elif copies is not None and batch % copies:
        what, expected = f"{copies} data-parallel ranks do not divide the training batch", f"a multiple of {copies}"
    else:
        return
    yield Violation("batch", key, what, expected, str(batch), _even_batch(sizes, batch, copies or 1))


def _even_batch(sizes: ParallelConfig, batch: int, copies: int) -> Mapping[str, Any]:
    """The nearest batch that splits over the copies; prompts change only where no batch of their rollouts does."""
    rollouts, group = sizes.rollouts, sizes.group
    if rollouts is None or group is None or sizes.prompts is None:
        return {KEYS["batch"]: max(1, round(batch / copies)) * copies}
    whole = [size for size in range(copies, rollouts + 1, copies) if rollouts % size == 0]
    if whole and not (sizes.on_policy and rollouts % copies):
        nearest = min(whole, key=lambda size: abs(math.log(size / batch)))
        return {KEYS["batch"]: rollouts if sizes.on_policy else nearest}
    of = copies // math.gcd(copies, group)
    prompts = max(1, round(sizes.prompts / of)) * of
    return {KEYS["batch"]: prompts * group, KEYS["prompts"]: prompts}


def _count(number: int, of: str) -> str:
    return f"{number} {of}{'' if number == 1 else 's'}"


def _text(value: Any) -> str:
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value).lower()
