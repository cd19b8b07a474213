"""What to paste where a layout is refused: what each broken rule asks for (`Misfit.mends`), one after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nemotron_steps.config.layout.facts import ModelFacts
from nemotron_steps.config.layout.misfits import Misfit, misfits, told
from nemotron_steps.config.layout.sizes import KEYS, LayoutSizes, key_of
from nemotron_steps.errors import ConfigError

_RULES = 12
"""That are mended in one hint at most."""


def suggestion(
    sizes: LayoutSizes, wrong: Callable[[LayoutSizes], Sequence[Misfit]], most_nodes: int | None = None
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


def _left(misfit: Misfit, found: Sequence[Misfit]) -> tuple[bool, bool, int]:
    return misfit.key in {each.key for each in found}, any(each.about != "batch" for each in found), len(found)


def with_values(sizes: LayoutSizes, values: Mapping[str, Any]) -> LayoutSizes:
    """Sizes under other values of config keys."""
    fields = {key_of(name, sizes.dtensor): name for name in KEYS}
    changed = {fields[key]: value for key, value in values.items() if key in fields}
    if "uses_vllm" in changed:
        changed |= {"uses_vllm": False, "generator_width": 1, "generator_experts": 1}
    teachers = tuple(teacher.with_values(values) for teacher in sizes.teachers)
    return replace(sizes, **changed, teachers=teachers)


def refuse(sizes: LayoutSizes, model: ModelFacts | None = None, *, found: Sequence[Misfit] | None = None) -> None:
    """Raise ConfigError, with everything that does not come out even and a hint that mends it, if anything does not.

    Args:
        found: misfits of these sizes to look at alone; None for all.
    """
    found = misfits(sizes, model) if found is None else found
    if found:
        what, expected, value = told(found)
        hints = pasted(suggestion(sizes, lambda after: misfits(after, model)))
        raise ConfigError(what, where=found[0].key, expected=expected, found=value, hints=hints)


def pasted(values: Mapping[str, Any] | None) -> list[str]:
    """A hint, as a request has it; none for nothing."""
    return [" ".join(f"{key}={_text(value)}" for key, value in values.items())] if values else []


def _text(value: Any) -> str:
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value).lower()
