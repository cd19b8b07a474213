"""Whether the layouts of distillation's teachers fit their models: the policy's layout, or one of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from nemotron_steps.config.layout.facts import ModelFacts
from nemotron_steps.config.layout.mends import mends
from nemotron_steps.config.layout.misfits import Misfit, model_misfits, told
from nemotron_steps.config.layout.sizes import MEGATRON, LayoutSizes
from nemotron_steps.config.layout.teachers import TeacherSizes
from nemotron_steps.errors import ConfigError


@dataclass(frozen=True)
class TeacherMisfit:
    """What is wrong with one teacher's layout.

    Attributes:
        misfits: under the config keys of its layout.
        hints: overrides, each of which mends all of them.
    """

    name: str
    misfits: tuple[Misfit, ...]
    hints: tuple[str, ...]


def teacher_misfits(sizes: LayoutSizes, models: Mapping[str, ModelFacts]) -> Iterator[TeacherMisfit]:
    """Teachers whose models their layouts do not fit.

    Args:
        sizes: of the run.
        models: teacher → facts of its model, where that is known.
    """
    apart = {teacher.name: teacher for teacher in sizes.teachers}
    for name, model in models.items():
        own: TeacherSizes | LayoutSizes = apart.get(name, sizes)
        section = own.section if isinstance(own, TeacherSizes) else MEGATRON
        layout = LayoutSizes(
            tensor=own.tensor,
            pipeline=own.pipeline,
            context=own.context,
            expert=own.expert,
            sequence_parallel=own.sequence_parallel,
        )
        found = tuple(
            Misfit("model", each.key.replace(MEGATRON, section), each.what, each.expected, each.found)
            for each in model_misfits(layout, model)
        )
        if found:
            hints = tuple(hint.replace(MEGATRON, section) for hint in mends(layout, model)[:2])
            yield TeacherMisfit(name, found, hints)


def refuse_teacher_misfits(sizes: LayoutSizes, models: Mapping[str, ModelFacts]) -> None:
    """ConfigError for the first teacher whose layout does not fit it."""
    for each in teacher_misfits(sizes, models):
        what, expected, found = told(each.misfits)
        raise ConfigError(
            f"teacher {each.name}: {what}",
            where=each.misfits[0].key,
            expected=expected,
            found=found,
            hints=each.hints,
        )
