"""Overrides that mend a layout: each of them, pasted, leaves nothing that does not come out even.

Found by looking: sizes near those asked for, more nodes, another share of generation, nearest first. What is found was
checked by the same functions that refuse, and by the caller's, who may know what memory it takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import islice, product
from typing import Any

from nemotron_steps.config.layout.facts import ModelFacts
from nemotron_steps.config.layout.misfits import Misfit, device_misfits, misfits, model_misfits, told
from nemotron_steps.config.layout.sizes import LayoutSizes, key_of
from nemotron_steps.errors import ConfigError

_WEIGHTS = {"tensor": 4.0, "pipeline": 3.0, "expert": 2.0, "context": 1.0, "generator_width": 1.0}
"""How much halving or doubling a size changes what the config meant: memory of weights before memory of activations."""
_MOST_NODES = 4096
_NEAR = 1024
"""Candidates of a kind that are looked at with the batch as it is, and then with one that comes out even."""
_WIDEST = 512
"""No size in place of another is larger; of one that is, divisors may be too many to look at."""
_COMBINATIONS = 100_000
"""Of sizes beside each other, how many are put in order at most."""
_ASKED = 64
"""Of those that come out even, how many of a kind the caller is asked about."""


def mends(
    sizes: LayoutSizes,
    model: ModelFacts | None = None,
    *,
    most_nodes: int | None = None,
    accepts: Callable[[LayoutSizes], bool] = lambda _: True,
) -> list[str]:
    """Overrides that mend every misfit, several in one string separated by a space; nearest first, none if none does.

    Args:
        most_nodes: nodes that there are.
        accepts: whether sizes that come out even are good otherwise.
    """
    layouts = list(_layouts(sizes, model))
    found = []
    for candidates in (
        layouts,
        _with_workers(sizes, layouts),
        _with_nodes(sizes, layouts, most_nodes or _MOST_NODES),
        _with_generation(sizes, layouts),
        _off_policy(sizes, layouts),
    ):
        near = list(islice(candidates, _NEAR))
        even = (each for each in dict.fromkeys([*near, *map(_with_batch, near)]) if not misfits(each, model))
        mended = next(filter(accepts, islice(even, _ASKED)), None)
        if mended is not None and mended != sizes:
            found.append(mended)
    found = [each for each in found if each.prompts == sizes.prompts] or found
    if any(misfit.about != "batch" for misfit in misfits(sizes, model)):
        found.sort(key=lambda mended: mended.batch != sizes.batch)
    return list(dict.fromkeys(overrides(sizes, mended) for mended in found))


def refuse(sizes: LayoutSizes, model: ModelFacts | None = None, *, found: Sequence[Misfit] | None = None) -> None:
    """Raise ConfigError, with everything that does not come out even and what mends it, if anything does not.

    Args:
        found: misfits of these sizes to look at alone; None for all.
    """
    found = misfits(sizes, model) if found is None else found
    if found:
        what, expected, value = told(found)
        raise ConfigError(what, where=found[0].key, expected=expected, found=value, hints=mends(sizes, model)[:2])


def overrides(before: LayoutSizes, after: LayoutSizes) -> str:
    """What turns one into the other, as a request has it."""
    return " ".join(f"{key}={_text(value)}" for key, value in changes(before, after).items())


def changes(before: LayoutSizes, after: LayoutSizes) -> dict[str, Any]:
    """What turns one into the other: config key → value."""
    changed: dict[str, Any] = {
        field.name: getattr(after, field.name)
        for field in fields(after)
        if getattr(after, field.name) != getattr(before, field.name)
    }
    if "uses_vllm" in changed:  # and with it whatever is vLLM's own
        changed = {name: value for name, value in changed.items() if not name.startswith("generator_")}
        changed["uses_vllm"] = "vllm" if after.uses_vllm else "embedded"
    changed.pop("teachers", None)
    written = {key_of(name, after.dtensor): value for name, value in changed.items()}
    for old, new in zip(before.teachers, after.teachers, strict=True):
        written |= old.overrides(new)
    return written


def _layouts(sizes: LayoutSizes, model: ModelFacts | None) -> Iterator[LayoutSizes]:
    """The layout itself, then others, those that change least first; all fit the model."""
    base = _with_abilities(sizes, model)
    base = replace(base, teachers=tuple(teacher.fitted(base.gpus_per_node) for teacher in base.teachers))
    options = _fewer({name: _near(getattr(base, name)) for name in _WEIGHTS}, base)
    candidates = (dict(zip(options, values, strict=True)) for values in product(*options.values()))
    for chosen in sorted(candidates, key=lambda chosen: _distance(base, chosen)):
        candidate = _resized(base, chosen)
        if model is not None and model.is_moe and candidate.tensor > 1 and not candidate.dtensor:
            candidate = replace(candidate, sequence_parallel=True)
        if candidate.generator_experts > 1:
            candidate = replace(candidate, generator_experts=candidate.generator_width)
        if model is None or not any(model_misfits(candidate, model)):
            yield candidate


def _with_abilities(sizes: LayoutSizes, model: ModelFacts | None) -> LayoutSizes:
    """Without what is not about sizes and the model does not have."""
    if model is None:
        return sizes
    if sizes.model_type not in (None, model.model_type):
        sizes = replace(sizes, model_type=None)
    if sizes.samples and model.is_moe and not model.is_hybrid and sizes.router_bias_update_rate:
        sizes = replace(sizes, router_bias_update_rate=0.0)
    if not model.is_moe:
        sizes = replace(sizes, router_replay=False)
    blocks = model.mtp_layers
    if sizes.mtp_layers and blocks is not None:
        repeats = blocks == 1 and (sizes.mtp_repeated or sizes.mtp_layers > 1)
        sizes = replace(sizes, mtp_layers=sizes.mtp_layers if repeats else blocks)
        if blocks:
            sizes = replace(sizes, mtp_repeated=repeats)
    if sizes.uses_vllm and model.bounds_time_steps:
        sizes = replace(sizes, uses_vllm=False, generator_width=1, generator_experts=1)
    most = model.positions
    if most is not None and sizes.length is not None and sizes.length > most:
        sizes = replace(sizes, length=most, length_end=None)
    elif most is not None and sizes.length_end is not None and sizes.length_end > most:
        sizes = replace(sizes, length_end=most)
    if most is not None and sizes.new_tokens is not None and sizes.new_tokens > most:
        sizes = replace(sizes, new_tokens=most)
    return sizes


def _with_workers(sizes: LayoutSizes, layouts: Sequence[LayoutSizes]) -> Iterator[LayoutSizes]:
    """On CPU as many ranks as whole copies need; on GPUs no number of ranks beside that of the devices."""
    for fitting in _at_fault(layouts):
        if sizes.gpus_per_node:
            yield replace(fitting, workers=None)
        elif sizes.backend == "ray":
            whole = math.lcm(fitting.copy_size, fitting.pipeline * fitting.expert)
            yield replace(fitting, workers=-(-sizes.ranks // whole) * whole)


def _with_nodes(sizes: LayoutSizes, layouts: Sequence[LayoutSizes], most: int) -> Iterator[LayoutSizes]:
    """As many nodes as are needed, more before fewer."""
    if not sizes.gpus_per_node:
        return
    for fitting in _at_fault(layouts):
        for nodes in [*range(sizes.nodes + 1, most + 1), *range(min(sizes.nodes, most + 1) - 1, 0, -1)]:
            candidate = replace(fitting, nodes=nodes)
            if not any(device_misfits(candidate)):
                yield candidate


def _with_generation(sizes: LayoutSizes, layouts: Sequence[LayoutSizes]) -> Iterator[LayoutSizes]:
    """Another share of the GPUs for generation, the nearest to what was asked for first, at most half of them."""
    if not sizes.separate or sizes.gpus < 2 or not any(_at_fault(layouts)):
        return
    half = max(1, sizes.gpus // 2)
    wanted = min(sizes.separate, half)
    for devices in sorted(range(1, sizes.gpus), key=lambda devices: (devices > half, abs(devices - wanted))):
        for fitting in layouts:
            candidate = replace(fitting, generation_devices=devices)
            if not any(device_misfits(candidate)):
                yield candidate
                break


def _off_policy(sizes: LayoutSizes, layouts: Sequence[LayoutSizes]) -> Iterator[LayoutSizes]:
    """Several updates a step, where only force_on_policy_ratio asks for one."""
    if sizes.on_policy and sizes.batch and sizes.rollouts and sizes.rollouts % sizes.batch == 0:
        yield from (replace(fitting, on_policy=False) for fitting in layouts[:1] if sizes.batch != sizes.rollouts)


def _at_fault(layouts: Sequence[LayoutSizes]) -> list[LayoutSizes]:
    """The layout nearest to what was asked for, where the devices do not fit it."""
    return [fitting for fitting in layouts[:1] if any(device_misfits(fitting))]


def _with_batch(sizes: LayoutSizes) -> LayoutSizes:
    """The nearest batch that comes out even; prompts change only where no batch of their rollouts does."""
    copies, batch, group = sizes.data_parallel, sizes.batch, sizes.group
    if copies is None or batch is None or batch < 1:
        return sizes
    if sizes.rollouts is None or group is None or sizes.prompts is None:
        return replace(sizes, batch=_nearest_multiple(batch, copies))
    if not sizes.on_policy:
        whole = [size for size in range(copies, sizes.rollouts + 1, copies) if sizes.rollouts % size == 0]
        if whole:
            return replace(sizes, batch=min(whole, key=lambda size: abs(math.log(size / batch))))
    prompts = _nearest_multiple(sizes.prompts, copies // math.gcd(copies, group))
    return replace(sizes, prompts=prompts, batch=prompts * group)


def _nearest_multiple(value: int, of: int) -> int:
    return max(1, round(value / of)) * of


def _near(size: int) -> list[int]:
    """The size and its divisors; and the powers of two up to the next, which is what most models are divided by."""
    powers = {2**power for power in range((min(size, _WIDEST) - 1).bit_length() + 1)}
    divisors = {part for part in range(1, size + 1) if size % part == 0} if size <= _WIDEST else {size}
    return sorted(powers | divisors, reverse=True) if size > 0 else []


def _fewer(options: dict[str, list[int]], base: LayoutSizes) -> dict[str, list[int]]:
    """The nearest options of each size and 1, so many that all their combinations are tried in a moment."""
    most = max(map(len, options.values()))
    while math.prod(min(len(values), most) for values in options.values()) > _COMBINATIONS:
        most -= 1
    kept = {}
    for name, values in options.items():
        size = getattr(base, name)
        nearest = sorted(values, key=lambda value, size=size: abs(math.log2(size / value)))[:most]  # type: ignore[misc]
        kept[name] = nearest if len(values) <= most else [*nearest[:-1], 1]
    return kept


def _resized(base: LayoutSizes, chosen: Mapping[str, int]) -> LayoutSizes:
    changes: dict[str, Any] = dict(chosen)
    return replace(base, **changes)


def _distance(base: LayoutSizes, chosen: Mapping[str, int]) -> float:
    return sum(weight * abs(math.log2(getattr(base, name) / chosen[name])) for name, weight in _WEIGHTS.items())


def _text(value: Any) -> str:
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value).lower()
