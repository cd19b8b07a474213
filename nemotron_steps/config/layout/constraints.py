"""Everything about a layout that does not come out even, over its model, its devices and its batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from nemotron_steps.config.layout.model_spec import ModelSpec
from nemotron_steps.config.layout.parallel_config import (
    KEYS,
    JudgeLayout,
    ParallelConfig,
    TeacherLayout,
    common_divisor,
    judge_copies,
    key_of,
    teachers_named,
)
from nemotron_steps.errors import ConfigError

LENGTHS = ("length", "length_end", "new_tokens")
"""Fields of `ParallelConfig` that count positions."""
CUTS = ("tensor", "pipeline", "context", "expert", "generator_width")
"""Fields of `ParallelConfig` that say over how many ranks a model is cut."""
_MOST = 512
"""No size in place of another is larger."""
_DOES_NOT, _OR_MULTIPLE = " does not divide ", "or multiple "


@dataclass(frozen=True)
class Violation:
    """One thing that does not come out even.

    Attributes:
        about: what it does not fit.
        key: the config key at fault.
        what: half a sentence, for a list of several.
        expected, found: of that key, or of what it makes.
        mends: config key → value, each of them what this rule asks for; best first. suggestions.py takes one.
        undivided: what the key's value does not divide, and how many there are of it; None of any other violation.
    """

    about: Literal["model", "devices", "batch"]
    key: str
    what: str
    expected: str
    found: str
    mends: Sequence[Mapping[str, Any]] = field(default=(), compare=False)
    undivided: tuple[str, int] | None = None


def violations(sizes: ParallelConfig, model: ModelSpec | None = None) -> list[Violation]:
    """All of them but consequences of others: a cut that the model has not does not divide devices either, and ranks
    that a wrong layout makes have no batch to split."""
    of_model = list(model_violations(sizes, model)) if model is not None else []
    found = [*of_model, *causes(sizes, [*device_violations(sizes)], {violation.key for violation in of_model})]
    return [*found, *batch_violations(sizes, None if found else sizes.data_parallel)]


def causes(sizes: ParallelConfig, found: Sequence[Violation], wrong: Collection[str]) -> list[Violation]:
    """What of violations about devices is not for cuts that are wrong anyway.

    Args:
        wrong: config keys that something else is the matter with.
    """
    if not found or not wrong:
        return [*found]
    uncut: dict[str, Any] = {cut: 1 for cut in CUTS if key_of(cut, sizes.dtensor) in wrong}
    teachers = []
    for teacher in sizes.teachers:
        own: dict[str, Any] = {cut: 1 for cut in CUTS[:4] if teacher.key(cut) in wrong}
        teachers.append(replace(teacher, **own))
    others = replace(sizes, teachers=tuple(teachers), **uncut)
    if others == sizes:
        return [*found]
    left = {(violation.key, violation.what) for violation in device_violations(others)}
    return [violation for violation in found if violation.about != "devices" or (violation.key, violation.what) in left]


def format_violations(several: Sequence[Violation]) -> tuple[str, str, str]:
    """What is wrong, what was expected and what was found, of one violation or of several in one error; a value that
    several counts are not divided by is one cause."""
    by_key: dict[str, list[Violation]] = {}
    for number, violation in enumerate(dict.fromkeys(several)):
        by_key.setdefault(violation.key if violation.undivided is not None else str(number), []).append(violation)
    alike = [_joined(each) for each in by_key.values()]
    what = "; ".join(violation.what for violation in alike)
    if len(alike) == 1:
        return what, alike[0].expected, alike[0].found
    names = [violation.key.rpartition(".")[2] for violation in alike]
    expected = "; ".join(f"{name}: {violation.expected}" for name, violation in zip(names, alike, strict=True))
    found = "; ".join(f"{name}: {violation.found}" for name, violation in zip(names, alike, strict=True))
    return what, expected, found


def _joined(alike: Sequence[Violation]) -> Violation:
    """One violation of several of a key whose value does not divide what it should."""
    if len(alike) == 1:
        return alike[0]
    parts = dict.fromkeys(each.undivided[0] for each in alike if each.undivided is not None)
    what = f"{alike[0].what.partition(_DOES_NOT)[0]}{_DOES_NOT}{', nor '.join(parts)}"
    counts = [each.undivided[1] for each in alike if each.undivided is not None and _OR_MULTIPLE not in each.expected]
    divisors = [_divisor(math.gcd(*counts))] if counts else []
    multiples = [each.expected for each in alike if _OR_MULTIPLE in each.expected]
    return replace(alike[0], what=what, expected=", and ".join(dict.fromkeys([*divisors, *multiples])))


def model_violations(sizes: ParallelConfig, model: ModelSpec) -> Iterator[Violation]:
    """What the policy and its generators cannot cut evenly over their ranks, or cannot do with this model."""
    if sizes.model_type not in (None, model.model_type):
        what = f"the config is for {sizes.model_type} models"
        key = KEYS["model_type"]
        yield Violation("model", key, what, str(sizes.model_type), model.model_type, [{key: None}])
    yield from _dtensor_violations(sizes, model) if sizes.dtensor else _megatron_violations(sizes, model)
    if sizes.uses_vllm:
        yield from _generator_violations(sizes, model)
    for name in LENGTHS:
        length, key = getattr(sizes, name), KEYS[name]
        if model.positions is not None and length is not None and length > model.positions:
            what = f"{key.rpartition('.')[2]}={length} is more than the positions of the model"
            grows = name == "length" and sizes.length_end is not None
            mends: list[dict[str, Any]] = [{key: model.positions} | ({KEYS["length_end"]: None} if grows else {})]
            yield Violation("model", key, what, f"at most {model.positions}", str(length), mends)


def _megatron_violations(sizes: ParallelConfig, model: ModelSpec) -> Iterator[Violation]:
    heads, shared = model.attention_heads, model.key_value_heads
    if heads is not None and heads % sizes.tensor:
        yield _undivided("tensor", sizes, heads, "attention heads")
    elif shared is not None and shared % sizes.tensor and sizes.tensor % shared:
        yield _undivided("tensor", sizes, shared, "key-value heads", _OR_MULTIPLE)
    elif heads is not None and shared is not None and model.head_dim is not None:
        rows = (heads + 2 * shared) * model.head_dim
        if rows % sizes.tensor:
            yield _undivided("tensor", sizes, rows, "the rows of queries, keys and values")
    if model.layers is not None and model.is_hybrid and model.layers < sizes.pipeline:
        what = "the model has fewer layers than pipeline stages"
        expected, mends = f"at most {model.layers}", _other("pipeline", sizes)
        yield Violation("model", KEYS["pipeline"], what, expected, str(sizes.pipeline), mends)
    elif model.layers is not None and model.layers % sizes.pipeline and not model.is_hybrid:
        yield _undivided("pipeline", sizes, model.layers, "layers")
    if sizes.mtp_layers and model.mtp_layers is not None:
        yield from _mtp_violations(sizes, model.mtp_layers)
    if model.mamba_heads is not None and model.mamba_groups is not None:
        yield from _mamba_violations(sizes, model.mamba_heads, model.mamba_groups)
    if not model.is_moe:
        if model.mlp_width is not None and model.mlp_width % sizes.tensor:
            yield _undivided("tensor", sizes, model.mlp_width, "the MLP's width")
        if sizes.expert > 1:
            what = "expert parallelism needs a mixture of experts"
            yield Violation("model", KEYS["expert"], what, "1", str(sizes.expert), [{KEYS["expert"]: 1}])
        if sizes.router_replay:
            what = "router replay needs a mixture of experts"
            yield Violation("model", KEYS["router_replay"], what, "false", "true", [{KEYS["router_replay"]: False}])
        return
    if model.shared_width is not None and model.shared_width % sizes.tensor:
        yield _undivided("tensor", sizes, model.shared_width, "the shared expert's width")
    if model.experts % sizes.expert:
        yield _undivided("expert", sizes, model.experts, "experts")
    if sizes.tensor > 1 and not sizes.sequence_parallel:
        what = "a mixture of experts under tensor parallelism needs sequence parallelism"
        yield Violation("model", KEYS["sequence_parallel"], what, "true", "false", [{KEYS["sequence_parallel"]: True}])
    if sizes.samples and sizes.router_bias_update_rate and not model.is_hybrid:
        yield Violation(
            "model",
            KEYS["router_bias_update_rate"],
            "no generator knows the biases of experts that would balance this policy's load",
            "0 where rollouts are sampled",
            f"{sizes.router_bias_update_rate:g}",
            [{KEYS["router_bias_update_rate"]: 0.0}],
        )


def _mamba_violations(sizes: ParallelConfig, heads: int, groups: int) -> Iterator[Violation]:
    """Mamba-2 is cut by heads. A group of them goes to one tensor-parallel rank, or stays with others on it; context
    parallel ranks may share a group, which they then all have."""
    if groups % sizes.tensor or heads % sizes.tensor:
        yield _undivided("tensor", sizes, common_divisor(groups, heads), "Mamba heads and their groups")
        return
    own_heads, own_groups = heads // sizes.tensor, groups // sizes.tensor
    if own_heads % sizes.context:
        yield _undivided("context", sizes, own_heads, "Mamba heads of a tensor-parallel rank")
    elif own_groups % sizes.context and sizes.context % own_groups:
        yield _undivided("context", sizes, own_groups, "Mamba groups of a tensor-parallel rank", _OR_MULTIPLE)


def _mtp_violations(sizes: ParallelConfig, blocks: int) -> Iterator[Violation]:
    """A depth of multi-token prediction is one block of the checkpoint's, or all depths are one block."""
    depths = sizes.mtp_layers
    if not blocks:
        what = "the model has no block of multi-token prediction that could be trained"
        yield Violation("model", KEYS["mtp_layers"], what, "0", str(depths), [{KEYS["mtp_layers"]: 0}])
    elif sizes.mtp_repeated and blocks > 1:
        what = f"one block is repeated, and the model has {blocks}"
        yield Violation("model", KEYS["mtp_repeated"], what, "false", "true", [{KEYS["mtp_repeated"]: False}])
    elif not sizes.mtp_repeated and depths != blocks:
        what = "the model has not as many blocks as depths of multi-token prediction are trained"
        expected = f"{blocks}, or {KEYS['mtp_repeated']}=true" if blocks == 1 else str(blocks)
        mends = [{KEYS["mtp_repeated"]: True} if blocks == 1 else {KEYS["mtp_layers"]: blocks}]
        yield Violation("model", KEYS["mtp_layers"], what, expected, str(depths), mends)


def _dtensor_violations(sizes: ParallelConfig, model: ModelSpec) -> Iterator[Violation]:
    key = key_of("tensor", sizes.dtensor)
    if sizes.tensor == 1:
        return
    if model.is_moe:
        what = "the dtensor policy does not cut experts over ranks"
        yield Violation("model", key, what, "1", str(sizes.tensor), [{key: 1}])
    elif model.is_hybrid:
        yield Violation("model", key, "transformers cuts no hybrid over ranks", "1", str(sizes.tensor), [{key: 1}])
    elif model.key_value_heads is not None and model.key_value_heads % sizes.tensor:
        yield _undivided("tensor", sizes, model.key_value_heads, "key-value heads")
    elif model.mlp_width is not None and model.mlp_width % sizes.tensor:
        yield _undivided("tensor", sizes, model.mlp_width, "the MLP's width")


def _generator_violations(sizes: ParallelConfig, model: ModelSpec) -> Iterator[Violation]:
    """vLLM cuts attention by heads; it repeats key-value heads where there are more ranks than those,
    but of Mamba-2's groups only a single one."""
    if model.bounds_time_steps:
        what = "vLLM leaves out the time_step_limit that bounds the time steps of this model"
        yield Violation("model", KEYS["uses_vllm"], what, "embedded", "vllm", [{KEYS["uses_vllm"]: "embedded"}])
    width, heads, shared = sizes.generator_width, model.attention_heads, model.key_value_heads
    if heads is not None and heads % width:
        yield _undivided("generator_width", sizes, heads, "attention heads (vLLM)")
    elif shared is not None and shared % width and width % shared:
        yield _undivided("generator_width", sizes, shared, "key-value heads (vLLM)", _OR_MULTIPLE)
    elif model.mamba_heads is not None and model.mamba_heads % width:
        yield _undivided("generator_width", sizes, model.mamba_heads, "Mamba heads (vLLM)")
    elif model.mamba_groups not in (None, 1) and model.mamba_groups % width:
        yield _undivided("generator_width", sizes, model.mamba_groups, "groups of Mamba heads (vLLM)")
    elif model.mlp_width is not None and model.mlp_width % width and sizes.generator_experts == 1:
        yield _undivided("generator_width", sizes, model.mlp_width, "the MLP's width (vLLM)")
    elif model.shared_width is not None and model.shared_width % width:
        yield _undivided("generator_width", sizes, model.shared_width, "the shared expert's width (vLLM)")


def _undivided(name: str, sizes: ParallelConfig, count: int, of: str, multiple: str = "") -> Violation:
    key, size = key_of(name, sizes.dtensor), getattr(sizes, name)
    what = f"{key.rpartition('.')[2]}={size}{_DOES_NOT}{of}"
    return Violation("model", key, what, _divisor(count, multiple), str(size), _other(name, sizes), (of, count))


def _other(name: str, sizes: ParallelConfig) -> list[Mapping[str, Any]]:
    """Other values of a size: the next larger first, which takes no more memory, then smaller ones. What the ranks of a
    node exchange for every layer stays within it."""
    size, key = getattr(sizes, name), key_of(name, sizes.dtensor)
    if name in ("tensor", "generator_width"):
        values = _within(size, sizes.gpus_per_node) if sizes.gpus_per_node else _nearest(size, 8)
    else:
        values = _nearest(size, min(2 * size, _MOST))
    along = [KEYS["generator_experts"]] if name == "generator_width" and sizes.generator_experts > 1 else []
    return [dict.fromkeys([key, *along], value) for value in values]


def _within(size: int, node: int) -> list[int]:
    """Divisors of a node's GPUs."""
    return [value for value in _nearest(size, node) if node % value == 0]


def _nearest(size: int, most: int) -> list[int]:
    return [*range(size + 1, most + 1), *range(min(size - 1, most), 0, -1)]


def _divisor(count: int, multiple: str = "") -> str:
    return f"a divisor {multiple}of {count}"


def device_violations(sizes: ParallelConfig) -> Iterator[Violation]:
    """What does not come out even over GPUs, or over the policy's processes on CPU."""
    if not sizes.gpus_per_node:
        if sizes.backend == "ray":
            yield from _process_violations(sizes)
        return
    if sizes.judge_nodes and sizes.judge_nodes >= sizes.nodes:
        what = f"judges take {sizes.judge_nodes} of {_nodes(sizes.nodes)}, and none is left for the policy"
        expected = f"less than {KEYS['nodes']}"
        yield Violation("devices", KEYS["judge_nodes"], what, expected, str(sizes.judge_nodes), _more(sizes))
        return
    yield from _teacher_violations(sizes)
    if sizes.gpus < 1:
        there = sizes.gpus + sizes.teaching
        what = f"teachers take {_gpus(sizes.teaching)} of {there}, and none is left for the policy"
        yield Violation(
            "devices", KEYS["nodes"], what, f"more than {_gpus(sizes.teaching)}", _gpus(there), _more(sizes)
        )
        return
    if sizes.ranks < 1:
        what = f"generation takes {_gpus(sizes.separate)} of {sizes.gpus}, and none is left for training"
        mends = [*_generating(sizes), *_more(sizes)]
        expected = f"fewer than {_gpus(sizes.gpus)}"
        yield Violation("devices", KEYS["generation_devices"], what, expected, str(sizes.separate), mends)
        return
    if sizes.workers not in (None, sizes.ranks):
        what = "on GPUs the number of policy ranks follows from the devices"
        mends = [{KEYS["workers"]: None}]
        yield Violation("devices", KEYS["workers"], what, f"null, or {sizes.ranks}", str(sizes.workers), mends)
    if sizes.ranks % sizes.copy_size:
        yield Violation(
            "devices",
            KEYS["nodes"],
            "the layout does not divide the GPUs that train",
            f"a multiple of {_product(sizes)}",
            f"{_gpus(sizes.ranks)} for training",
            _dividing(sizes, lambda name: key_of(name, sizes.dtensor), sizes.ranks, sizes.gpus_per_node, _more(sizes)),
        )
    elif (sizes.ranks // sizes.pipeline) % sizes.expert:
        yield Violation(
            "devices",
            KEYS["expert"],
            "expert parallelism does not divide the GPUs of a pipeline stage",
            f"a divisor of {sizes.ranks // sizes.pipeline}",
            str(sizes.expert),
            _other("expert", sizes),
        )
    yield from _generator_devices(sizes)
    yield from judge_violations(sizes, sizes.judges)


def _teacher_violations(sizes: ParallelConfig) -> Iterator[Violation]:
    """Of teachers that have devices of their own; once for all that take their layout from the same section."""
    alike: dict[TeacherLayout, list[str]] = {}
    for teacher in sizes.teachers:
        alike.setdefault(replace(teacher, name=""), []).append(teacher.name)
    for teacher, names in alike.items():
        who, whose = teachers_named(names), "its" if len(names) == 1 else "their"
        ranks, limit = teacher.ranks(sizes.gpus_per_node), sizes.gpus_per_node
        if (teacher.gpus_per_node or 0) > limit:
            what = f"{who} ask{'s' if len(names) == 1 else ''} for more GPUs of a node than it has"
            key = teacher.key("gpus_per_node")
            yield Violation("devices", key, what, f"at most {limit}", str(teacher.gpus_per_node), [{key: limit}])
        elif ranks % teacher.copy_size:
            what = f"the layout of {who} does not divide {whose} GPUs"
            expected = f"a multiple of TP × PP × CP = {teacher.copy_size}"
            mends = _dividing(teacher, teacher.key, ranks, teacher.gpus_per_node or limit)
            yield Violation("devices", teacher.key("gpus_per_node"), what, expected, _gpus(ranks), mends)
        elif (ranks // teacher.pipeline) % teacher.expert:
            what = f"expert parallelism of {who} does not divide {whose} GPUs"
            expected = f"a divisor of {ranks // teacher.pipeline}"
            mends = [{teacher.key("expert"): size} for size in _nearest(teacher.expert, min(2 * teacher.expert, _MOST))]
            yield Violation("devices", teacher.key("expert"), what, expected, str(teacher.expert), mends)


def _process_violations(sizes: ParallelConfig) -> Iterator[Violation]:
    if sizes.ranks % sizes.copy_size:
        found = f"{sizes.ranks} rank{'s' if sizes.ranks > 1 else ''} on CPU"
        what = "the layout does not divide the policy's ranks"
        whole = math.lcm(sizes.copy_size, sizes.pipeline * sizes.expert)
        mends = [{KEYS["workers"]: -(-sizes.ranks // whole) * whole}]
        yield Violation("devices", KEYS["workers"], what, f"a multiple of {_product(sizes)}", found, mends)
    elif (sizes.ranks // sizes.pipeline) % sizes.expert:
        what = "expert parallelism does not divide the ranks of a pipeline stage"
        expected = f"a divisor of {sizes.ranks // sizes.pipeline}"
        yield Violation("devices", KEYS["expert"], what, expected, str(sizes.expert), _other("expert", sizes))
    if sizes.separate % sizes.generator_width:
        yield _no_whole_generators(sizes)


def _no_whole_generators(sizes: ParallelConfig) -> Violation:
    what = "the devices that generate do not make whole generators"
    expected = f"a multiple of {KEYS['generator_width']}={sizes.generator_width}"
    width, node = sizes.generator_width, sizes.gpus_per_node
    whole = [{KEYS["generation_devices"]: max(1, round(sizes.separate / width)) * width}]
    mends = [*whole, *_generating(sizes)] if node % width == 0 else _other("generator_width", sizes)
    return Violation("devices", KEYS["generation_devices"], what, expected, str(sizes.separate), mends)


def _generator_devices(sizes: ParallelConfig) -> Iterator[Violation]:
    """A generator's GPUs are on one node, and the GPUs that generate make whole generators."""
    width, available, per_node = sizes.generator_width, sizes.generating, sizes.gpus_per_node
    if not sizes.samples:
        return
    limit = min(available, per_node)
    if width > limit:
        what = "a generator needs more GPUs than generate on a node"
        mends = _other("generator_width", sizes)
        yield Violation("devices", KEYS["generator_width"], what, f"at most {limit}", str(width), mends)
    elif sizes.separate % width:
        yield _no_whole_generators(sizes)
    elif available % width or per_node % width:
        what = "generators do not divide the GPUs that generate"
        expected = f"a divisor of {_gpus(available)}, and of {per_node} on a node"
        mends = _other("generator_width", sizes)
        yield Violation("devices", KEYS["generator_width"], what, expected, str(width), mends)


def _more(sizes: ParallelConfig) -> list[Mapping[str, Any]]:
    """Other numbers of nodes, more before fewer."""
    apart = sizes.judge_nodes + -(-(sizes.teaching + sizes.separate) // max(1, sizes.gpus_per_node))
    most = sizes.nodes + min(apart + sizes.copy_size, _MOST)
    return [{KEYS["nodes"]: nodes} for nodes in _nearest(sizes.nodes, most)]


def _generating(sizes: ParallelConfig) -> list[Mapping[str, Any]]:
    """Other shares of the GPUs for generation, at most half of them and as near as they can be."""
    half = max(1, sizes.gpus // 2)
    shares = sorted(
        range(1, max(1, sizes.gpus)), key=lambda share: (share > half, abs(share - min(sizes.separate, half)))
    )
    return [{KEYS["generation_devices"]: share} for share in shares[:_MOST]]


def _dividing(
    cuts: ParallelConfig | TeacherLayout,
    key: Callable[[str], str],
    ranks: int,
    node: int,
    more: Sequence[Mapping[str, Any]] = (),
) -> list[Mapping[str, Any]]:
    """Layouts that divide ranks: TP is a divisor of a node's GPUs, next to what it is; or more nodes, where one copy
    needs them; or every size is what of it divides what is left."""
    within: list[Mapping[str, Any]] = [{key("tensor"): size} for size in _within(cuts.tensor, node)]
    left, cut = ranks, {}
    for name in ("tensor", "pipeline", "context"):
        size = math.gcd(getattr(cuts, name), left, *([node] if name == "tensor" else []))
        left //= size
        if size != getattr(cuts, name):
            cut[key(name)] = size
    if node % cuts.tensor:
        return [*within, cut]  # more nodes would spread tensor-parallel groups over them
    return [*more, *within, cut] if cuts.copy_size > ranks else [*within, cut, *more]


def judge_violations(sizes: ParallelConfig, judges: Sequence[JudgeLayout]) -> Iterator[Violation]:
    """Local judges that the GPUs kept for them, or those they share with generators, do not hold."""
    if not sizes.gpus_per_node or not judges:
        return
    if not sizes.judge_nodes:
        wide = next((judge for judge in judges if judge.width > 1), None)
        if wide is not None:
            what = f"{wide.role} takes several GPUs, which needs nodes that are kept for judges"
            key = f"{wide.section}.tensor_parallel_size"
            yield Violation("devices", key, what, f"{KEYS['judge_nodes']}=1 or more", str(wide.width))
        return
    copies = judge_copies(sizes, tuple(judges))
    needed = sum(copies[judge.role] * judge.width for judge in judges)
    if needed > sizes.judge_nodes * sizes.gpus_per_node or any(j.width > sizes.gpus_per_node for j in judges):
        counted = ", ".join(f"{count} x {role}" for role, count in copies.items())
        found = f"{_nodes(sizes.judge_nodes)} of {_gpus(sizes.gpus_per_node)}"
        what = "the nodes kept for judges have too few GPUs for them"
        yield Violation("devices", KEYS["judge_nodes"], what, f"{_gpus(needed)} for {counted}", found)


def batch_violations(sizes: ParallelConfig, copies: int | None) -> Iterator[Violation]:
    """Rollouts of a step fill whole training batches, exactly one under force_on_policy_ratio, and a batch splits over
    the copies of the model, where their number is known."""
    batch, rollouts = sizes.batch, sizes.rollouts
    if batch is None or batch < 1:
        return
    product = f"num_prompts_per_step {sizes.prompts} × num_generations_per_prompt {sizes.group} = {rollouts}"
    key, mends = KEYS["batch"], [_even_batch(sizes, batch, copies or 1)]
    if rollouts is not None and sizes.on_policy and batch != rollouts:
        what = "loss_fn.force_on_policy_ratio needs one update per step"
        yield Violation("batch", key, what, f"{key} = {product}", str(batch), mends)
    elif rollouts is not None and rollouts % batch:
        what = "the rollouts of a step do not fill whole training batches"
        yield Violation("batch", key, what, f"{key} that divides {product}", str(batch), mends)
    elif copies is not None and batch % copies:
        what = "the training batch does not split over the data-parallel ranks"
        yield Violation("batch", key, what, f"a multiple of {copies} ranks", str(batch), mends)


def _even_batch(sizes: ParallelConfig, batch: int, copies: int) -> Mapping[str, Any]:
    """The nearest batch that splits over the copies; prompts change only where no batch of their rollouts does."""
    rollouts = sizes.rollouts
    if rollouts is None or sizes.group is None or sizes.prompts is None:
        return {KEYS["batch"]: _multiple(batch, copies)}
    if sizes.on_policy and rollouts % copies == 0:
        return {KEYS["batch"]: rollouts}
    whole = [size for size in range(copies, rollouts + 1, copies) if rollouts % size == 0]
    if whole and not sizes.on_policy:
        return {KEYS["batch"]: min(whole, key=lambda size: abs(math.log(size / batch)))}
    prompts = _multiple(sizes.prompts, copies // math.gcd(copies, sizes.group))
    return {KEYS["batch"]: prompts * sizes.group, KEYS["prompts"]: prompts}


def _multiple(value: int, of: int) -> int:
    return max(1, round(value / of)) * of


def _product(sizes: ParallelConfig) -> str:
    parts = {"TP": sizes.tensor, "PP": sizes.pipeline, "CP": sizes.context}
    shown = " × ".join(f"{name} {size}" for name, size in parts.items() if size > 1 or name == "TP")
    return f"{shown} = {sizes.copy_size}" if "×" in shown else shown


def _gpus(count: int) -> str:
    return f"{count} GPU{'' if count == 1 else 's'}"


def _nodes(count: int) -> str:
    return f"{count} node{'' if count == 1 else 's'}"


_RULES = 12
"""That are mended in one hint at most."""


def suggestion(
    sizes: ParallelConfig, wrong: Callable[[ParallelConfig], Sequence[Violation]], most_nodes: int | None = None
) -> dict[str, Any] | None:
    """Config key → value of one hint after which nothing is wrong; None where what the rules ask for does not do.

    Args:
        most_nodes: nodes that there are.
    """
    changed: dict[str, Any] = {}
    for _ in range(_RULES):
        found = wrong(sizes)
        if not found:
            return changed
        offered = [
            (_left(found[0], wrong(after)), number, mend, after)
            for number, mend in enumerate(found[0].mends)
            if most_nodes is None or mend.get(KEYS["nodes"], 0) <= most_nodes
            if (after := with_values(sizes, mend)) != sizes
        ]
        if not offered:
            return None
        _, _, mend, sizes = min(offered, key=lambda each: each[:2])
        changed |= mend
    return None


def _left(violation: Violation, found: Sequence[Violation]) -> tuple[bool, bool, int]:
    return violation.key in {each.key for each in found}, any(each.about != "batch" for each in found), len(found)


def with_values(sizes: ParallelConfig, values: Mapping[str, Any]) -> ParallelConfig:
    """Sizes under other values of config keys."""
    fields = {key_of(name, sizes.dtensor): name for name in KEYS}
    changed = {fields[key]: value for key, value in values.items() if key in fields}
    if "uses_vllm" in changed:
        changed |= {"uses_vllm": False, "generator_width": 1, "generator_experts": 1}
    teachers = tuple(teacher.with_values(values) for teacher in sizes.teachers)
    return replace(sizes, **changed, teachers=teachers)


def raise_if_violated(
    sizes: ParallelConfig, model: ModelSpec | None = None, *, found: Sequence[Violation] | None = None
) -> None:
    """Raise ConfigError, with everything that does not come out even and a hint that mends it, if anything does not.

    Args:
        found: violations of these sizes to look at alone; None for all.
    """
    found = violations(sizes, model) if found is None else found
    if found:
        what, expected, value = format_violations(found)
        hints = pasted(suggestion(sizes, lambda after: violations(after, model)))
        raise ConfigError(what, where=found[0].key, expected=expected, found=value, hints=hints)


def pasted(values: Mapping[str, Any] | None) -> list[str]:
    """A hint, as a request has it; none for nothing."""
    return [" ".join(f"{key}={_text(value)}" for key, value in values.items())] if values else []


def _text(value: Any) -> str:
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value).lower()
