"""Everything about a layout that does not divide its model, its devices or its batch, each with what to paste."""

from __future__ import annotations

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
    heads, shared = model.attention_heads, model.key_value_heads
    if heads is not None and heads % sizes.tensor:
        yield _undivided("tensor", sizes, heads, "attention heads")
    elif shared is not None and shared % sizes.tensor and sizes.tensor % shared:
        yield _undivided("tensor", sizes, shared, "key-value heads", or_multiple=True)
    elif heads is not None and shared is not None and model.head_dim is not None:
        rows = (heads + 2 * shared) * model.head_dim
        if rows % sizes.tensor:
            yield _undivided("tensor", sizes, rows, "rows of queries, keys and values")
    if model.layers is not None and model.is_hybrid and model.layers < sizes.pipeline:
        what = f"pipeline_model_parallel_size={sizes.pipeline} is more than the {model.layers} layers of the model"
        fix = _divisor(sizes.pipeline, model.layers)
        yield _of_model("pipeline", what, f"at most {model.layers}", str(sizes.pipeline), fix)
    elif model.layers is not None and model.layers % sizes.pipeline and not model.is_hybrid:
        yield _undivided("pipeline", sizes, model.layers, "layers")
    if sizes.mtp_layers and model.mtp_layers is not None:
        yield from _mtp_violations(sizes, model.mtp_layers)
    if model.mamba_heads is not None and model.mamba_groups is not None:
        yield from _mamba_violations(sizes, model.mamba_heads, model.mamba_groups)
    if not model.is_moe:
        if model.mlp_width is not None and model.mlp_width % sizes.tensor:
            yield _undivided("tensor", sizes, model.mlp_width, "rows of the MLP")
        if sizes.expert > 1:
            yield _of_model("expert", "expert parallelism needs a mixture of experts", "1", str(sizes.expert), 1)
        if sizes.router_replay:
            yield _of_model("router_replay", "router replay needs a mixture of experts", "false", "true", False)
        return
    if model.shared_width is not None and model.shared_width % sizes.tensor:
        yield _undivided("tensor", sizes, model.shared_width, "rows of the shared expert")
    if model.experts % sizes.expert:
        yield _undivided("expert", sizes, model.experts, "experts")
    if sizes.tensor > 1 and not sizes.sequence_parallel:
        what = "a mixture of experts under tensor parallelism needs sequence parallelism"
        yield _of_model("sequence_parallel", what, "true", "false", True)
    if sizes.samples and sizes.router_bias_update_rate and not model.is_hybrid:
        what = "no generator knows the biases of experts that would balance this policy's load"
        found = f"{sizes.router_bias_update_rate:g}"
        yield _of_model("router_bias_update_rate", what, "0 where rollouts are sampled", found, 0.0)


def _mamba_violations(sizes: ParallelConfig, heads: int, groups: int) -> Iterator[Violation]:
    """Mamba-2 is cut by heads. A group of them goes to one tensor-parallel rank, or stays with others on it; context
    parallel ranks may share a group, which they then all have."""
    if groups % sizes.tensor or heads % sizes.tensor:
        yield _undivided("tensor", sizes, max(1, math.gcd(groups, heads)), "Mamba heads and their groups")
        return
    own_heads, own_groups = heads // sizes.tensor, groups // sizes.tensor
    if own_heads % sizes.context:
        yield _undivided("context", sizes, own_heads, "Mamba heads of a tensor-parallel rank")
    elif own_groups % sizes.context and sizes.context % own_groups:
        yield _undivided("context", sizes, own_groups, "Mamba groups of a tensor-parallel rank", or_multiple=True)


def _mtp_violations(sizes: ParallelConfig, blocks: int) -> Iterator[Violation]:
    """A depth of multi-token prediction is one block of the checkpoint's, or all depths are one block."""
    depths = sizes.mtp_layers
    if not blocks:
        what = "the model has no block of multi-token prediction that could be trained"
        yield _of_model("mtp_layers", what, "0", str(depths), 0)
    elif sizes.mtp_repeated and blocks > 1:
        what = f"one block is repeated, and the model has {blocks}"
        hint = {KEYS["mtp_repeated"]: False, KEYS["mtp_layers"]: blocks}
        yield Violation("model", KEYS["mtp_repeated"], what, "false", "true", hint)
    elif not sizes.mtp_repeated and depths != blocks:
        what = "the model has not as many blocks as depths of multi-token prediction are trained"
        expected = f"{blocks}, or {KEYS['mtp_repeated']}=true" if blocks == 1 else str(blocks)
        hint = {KEYS["mtp_repeated"]: True} if blocks == 1 else {KEYS["mtp_layers"]: blocks}
        yield Violation("model", KEYS["mtp_layers"], what, expected, str(depths), hint)


def _dtensor_violations(sizes: ParallelConfig, model: ModelSpec) -> Iterator[Violation]:
    key = key_of("tensor", sizes.dtensor)
    if sizes.tensor == 1:
        return
    if model.is_moe or model.is_hybrid:
        what = f"the dtensor policy does not cut {'experts' if model.is_moe else 'hybrid models'} over ranks"
        yield Violation("model", key, what, "1", str(sizes.tensor), {key: 1})
    elif model.key_value_heads is not None and model.key_value_heads % sizes.tensor:
        yield _undivided("tensor", sizes, model.key_value_heads, "key-value heads")
    elif model.mlp_width is not None and model.mlp_width % sizes.tensor:
        yield _undivided("tensor", sizes, model.mlp_width, "rows of the MLP")


def _generator_violations(sizes: ParallelConfig, model: ModelSpec) -> Iterator[Violation]:
    """vLLM cuts attention by heads; it repeats key-value heads where there are more ranks than those,
    but of Mamba-2's groups only a single one."""
    if model.bounds_time_steps:
        what = "vLLM leaves out the time_step_limit that bounds the time steps of this model"
        alone = _cut_to("generator_width", sizes, 1) if sizes.generator_width > 1 else {}
        yield Violation("model", KEYS["uses_vllm"], what, "embedded", "vllm", {KEYS["uses_vllm"]: "embedded", **alone})
    width, shared = sizes.generator_width, model.key_value_heads
    if shared is not None and shared % width and width % shared and not (model.attention_heads or 0) % width:
        yield _undivided("generator_width", sizes, shared, "key-value heads (vLLM)", or_multiple=True)
        return
    cut_mlp = model.mlp_width if sizes.generator_experts == 1 else None
    for count, of in (
        (model.attention_heads, "attention heads"),
        (model.mamba_heads, "Mamba heads"),
        (None if model.mamba_groups == 1 else model.mamba_groups, "groups of Mamba heads"),
        (cut_mlp, "rows of the MLP"),
        (model.shared_width, "rows of the shared expert"),
    ):
        if count is not None and count % width:
            yield _undivided("generator_width", sizes, count, f"{of} (vLLM)")
            return


def _undivided(name: str, sizes: ParallelConfig, count: int, of: str, *, or_multiple: bool = False) -> Violation:
    """A cut that does not divide what the model has `count` of. The next smaller one that does: of TP also within a
    node, or among the processes on CPU; of vLLM, whose width several models may share, one that still divides what the
    width did."""
    key, size = key_of(name, sizes.dtensor), getattr(sizes, name)
    also = {"tensor": sizes.gpus_per_node or sizes.workers or 0, "generator_width": size}
    within = math.gcd(count, also.get(name, 0))
    what = f"{key.rpartition('.')[2]}={size} does not divide {count} {of}"
    expected = f"a divisor {'or multiple ' if or_multiple else ''}of {count}"
    return Violation("model", key, what, expected, str(size), _cut_to(name, sizes, _divisor(within, size)))


def _divisor(count: int, most: int) -> int:
    """The largest divisor of a count that is not above `most`."""
    return next(size for size in range(min(count, most), 0, -1) if count % size == 0)


def _cut_to(name: str, sizes: ParallelConfig, size: int) -> dict[str, Any]:
    """Another size of a cut; the experts of a generator are spread over its width or not at all."""
    along = [KEYS["generator_experts"]] if name == "generator_width" and sizes.generator_experts > 1 else []
    return dict.fromkeys([key_of(name, sizes.dtensor), *along], size)


def device_violations(sizes: ParallelConfig) -> Iterator[Violation]:
    """What does not divide the GPUs, or the policy's processes on CPU."""
    per_node = sizes.gpus_per_node
    if not per_node:
        if sizes.backend == "ray":
            yield from _process_violations(sizes)
        return
    if sizes.judge_nodes and sizes.judge_nodes >= sizes.nodes:
        what = f"judges take {sizes.judge_nodes} of {_count(sizes.nodes, 'node')}, and none is left for the policy"
        hint = {KEYS["nodes"]: sizes.judge_nodes + 1}
        yield _of_devices(KEYS["judge_nodes"], what, f"less than {KEYS['nodes']}", str(sizes.judge_nodes), hint)
        return
    yield from _teacher_violations(sizes)
    if sizes.gpus < 1:
        there, taken = sizes.gpus + sizes.teaching, _count(sizes.teaching, "GPU")
        what = f"teachers take {taken} of {there}, and none is left for the policy"
        hint = {KEYS["nodes"]: sizes.judge_nodes + sizes.teaching // per_node + 1}
        yield _of_devices(KEYS["nodes"], what, f"more than {taken}", _count(there, "GPU"), hint)
        return
    if sizes.ranks < 1:
        what = f"generation takes {_count(sizes.separate, 'GPU')} of {sizes.gpus}, and none is left for training"
        half = sizes.gpus // 2 // sizes.generator_width * sizes.generator_width
        more = sizes.nodes + (sizes.separate - sizes.gpus) // per_node + 1
        hint = {KEYS["generation_devices"]: half} if half else {KEYS["nodes"]: more}
        expected = f"fewer than {_count(sizes.gpus, 'GPU')}"
        yield _of_devices(KEYS["generation_devices"], what, expected, str(sizes.separate), hint)
        return
    if sizes.workers not in (None, sizes.ranks):
        what = "on GPUs the number of policy ranks follows from the devices"
        expected = f"null, or {sizes.ranks}"
        yield _of_devices(KEYS["workers"], what, expected, str(sizes.workers), {KEYS["workers"]: None})
    key = key_of("tensor", sizes.dtensor)
    if per_node % sizes.tensor:
        yield _outside_a_node(key, sizes.tensor, per_node)
    elif sizes.ranks % sizes.copy_size:
        what = f"{_product(sizes)} does not divide the {_count(sizes.ranks, 'GPU')} that train"
        hint = {key_of(name, sizes.dtensor): size for name, size in _dividing(sizes, sizes.ranks).items()}
        yield _of_devices(KEYS["nodes"], what, f"a multiple of {sizes.copy_size}", _count(sizes.ranks, "GPU"), hint)
    elif (sizes.ranks // sizes.pipeline) % sizes.expert:
        yield _experts_undivided(KEYS["expert"], sizes.expert, sizes.ranks // sizes.pipeline, "GPUs")
    yield from _generator_devices(sizes)
    yield from judge_violations(sizes, sizes.judges)


def _of_devices(key: str, what: str, expected: str, found: str, hint: Mapping[str, Any]) -> Violation:
    return Violation("devices", key, what, expected, found, hint)


def _outside_a_node(key: str, tensor: int, per_node: int, who: str = "") -> Violation:
    """Tensor-parallel ranks exchange activations in every layer, which is for NVLink."""
    what = f"{key.rpartition('.')[2]}={tensor}{who} does not divide the {_count(per_node, 'GPU')} of a node"
    return _of_devices(key, what, f"a divisor of {per_node}", str(tensor), {key: math.gcd(tensor, per_node)})


def _experts_undivided(key: str, expert: int, ranks: int, of: str, who: str = "") -> Violation:
    what = f"expert_model_parallel_size={expert}{who} does not divide the {ranks} {of} of a pipeline stage"
    return _of_devices(key, what, f"a divisor of {ranks}", str(expert), {key: math.gcd(expert, ranks)})


def _dividing(cuts: ParallelConfig | TeacherLayout, ranks: int) -> dict[str, int]:
    """Cuts that divide ranks, those that differ: each is what of it divides what those before leave."""
    found = {}
    for name in ("tensor", "pipeline", "context"):
        size = math.gcd(getattr(cuts, name), ranks)
        ranks //= size
        if size != getattr(cuts, name):
            found[name] = size
    return found


def _teacher_violations(sizes: ParallelConfig) -> Iterator[Violation]:
    """Of teachers that have devices of their own; once for all that take their layout from the same section."""
    alike: dict[TeacherLayout, list[str]] = {}
    for teacher in sizes.teachers:
        alike.setdefault(replace(teacher, name=""), []).append(teacher.name)
    for teacher, names in alike.items():
        ranks, limit, key = teacher.ranks(sizes.gpus_per_node), sizes.gpus_per_node, teacher.key("gpus_per_node")
        who, per_node = f" of {teachers_named(names)}", teacher.gpus_per_node or limit
        if per_node > limit:
            what = f"gpus_per_node={per_node}{who} is more than a node has"
            yield _of_devices(key, what, f"at most {limit}", str(per_node), {key: limit})
        elif per_node % teacher.tensor:
            yield _outside_a_node(teacher.key("tensor"), teacher.tensor, per_node, who)
        elif ranks % teacher.copy_size:
            what = f"{_product(teacher)}{who} does not divide their {_count(ranks, 'GPU')}"
            hint = {teacher.key(name): size for name, size in _dividing(teacher, ranks).items()}
            yield _of_devices(key, what, f"a multiple of {teacher.copy_size}", _count(ranks, "GPU"), hint)
        elif (ranks // teacher.pipeline) % teacher.expert:
            stage = ranks // teacher.pipeline
            yield _experts_undivided(teacher.key("expert"), teacher.expert, stage, "GPUs", who)


def _process_violations(sizes: ParallelConfig) -> Iterator[Violation]:
    if sizes.ranks % sizes.copy_size:
        what = f"{_product(sizes)} does not divide the {_count(sizes.ranks, 'policy rank')} on CPU"
        whole = math.lcm(sizes.copy_size, sizes.pipeline * sizes.expert)
        hint = {KEYS["workers"]: -(-sizes.ranks // whole) * whole}
        yield _of_devices(KEYS["workers"], what, f"a multiple of {sizes.copy_size}", str(sizes.ranks), hint)
    elif (sizes.ranks // sizes.pipeline) % sizes.expert:
        yield _experts_undivided(KEYS["expert"], sizes.expert, sizes.ranks // sizes.pipeline, "ranks")
    if sizes.separate % sizes.generator_width:
        yield _no_whole_generators(sizes)


def _no_whole_generators(sizes: ParallelConfig) -> Violation:
    width = sizes.generator_width
    what = f"{_count(sizes.separate, 'device')} that generate do not make whole generators of {width}"
    hint = {KEYS["generation_devices"]: max(1, sizes.separate // width) * width}
    key, expected = KEYS["generation_devices"], f"a multiple of {KEYS['generator_width']}={width}"
    return _of_devices(key, what, expected, str(sizes.separate), hint)


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
        yield _no_whole_generators(sizes)
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


def _product(cuts: ParallelConfig | TeacherLayout) -> str:
    parts = {"TP": cuts.tensor, "PP": cuts.pipeline, "CP": cuts.context}
    names = [name for name, size in parts.items() if size > 1]
    return f"{'×'.join(names or ['TP'])}={cuts.copy_size}"


def _count(number: int, of: str) -> str:
    return f"{number} {of}{'' if number == 1 else 's'}"


def _text(value: Any) -> str:
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value).lower()
