"""Whether the layouts of distillation's teachers fit their models: the policy's layout, or one of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from nemotron_steps.config.layout.facts import ModelFacts
from nemotron_steps.config.layout.misfits import Misfit, device_misfits, model_misfits, told
from nemotron_steps.config.layout.sizes import MEGATRON, LayoutSizes
from nemotron_steps.config.layout.suggestions import pasted, suggestion
from nemotron_steps.config.layout.teachers import TeacherSizes, teachers_named
from nemotron_steps.errors import ConfigError

_CUTS = ("tensor", "pipeline", "context", "expert", "sequence_parallel")


@dataclass(frozen=True)
class TeacherMisfit:
    """What is wrong with one layout, for one teacher or for several of which it is.

    Attributes:
        names: of these teachers.
        misfits: under the config keys of the layout.
    """

    names: tuple[str, ...]
    misfits: tuple[Misfit, ...]

    @property
    def who(self) -> str:
        """The teachers, in words."""
        return teachers_named(self.names)


def teachers_fit(sizes: LayoutSizes, models: Mapping[str, ModelFacts]) -> bool:
    """Whether every teacher's layout fits its model.

    Args:
        sizes: of the run.
        models: teacher → facts of its model, where that is known.
    """
    return not any(_found(_own(sizes, name), model, sizes.gpus_per_node) for name, model in models.items())


def teacher_misfits(sizes: LayoutSizes, models: Mapping[str, ModelFacts]) -> Iterator[TeacherMisfit]:
    """Teachers whose models their layouts do not fit; arguments as `teachers_fit`'s. What is wrong with a layout is
    told once for all teachers."""
    alike: dict[frozenset[str], dict[str, list[Misfit]]] = {}
    for name, model in models.items():
        if found := _found(_own(sizes, name), model, sizes.gpus_per_node):
            alike.setdefault(frozenset(misfit.key for misfit in found), {})[name] = found
    for teachers in alike.values():
        together = tuple(misfit for found in teachers.values() for misfit in found)
        yield TeacherMisfit(tuple(teachers), together)


def _own(sizes: LayoutSizes, name: str) -> TeacherSizes | LayoutSizes:
    return next((teacher for teacher in sizes.teachers if teacher.name == name), sizes)


def _found(own: TeacherSizes | LayoutSizes, model: ModelFacts, node: int) -> list[Misfit]:
    """What of a layout is the teacher's, under its own keys."""
    layout = LayoutSizes(**{name: getattr(own, name) for name in _CUTS}, gpus_per_node=node)

    def named(key: str) -> str:
        return key.replace(MEGATRON, own.section if isinstance(own, TeacherSizes) else MEGATRON)

    return [
        replace(
            each, key=named(each.key), mends=[{named(key): each for key, each in mend.items()} for mend in each.mends]
        )
        for each in model_misfits(layout, model)
    ]


def wrong_for(sizes: LayoutSizes, models: Mapping[str, ModelFacts]) -> list[Misfit]:
    """Everything that is wrong with teachers' layouts, for their models or for the devices."""
    return [*(misfit for each in teacher_misfits(sizes, models) for misfit in each.misfits), *device_misfits(sizes)]


def refuse_teacher_misfits(sizes: LayoutSizes, models: Mapping[str, ModelFacts]) -> None:
    """ConfigError for the first layout that does not fit a teacher."""
    for each in teacher_misfits(sizes, models):
        what, expected, found = told(each.misfits)
        raise ConfigError(
            f"{each.who}: {what}",
            where=each.misfits[0].key,
            expected=expected,
            found=found,
            hints=pasted(suggestion(sizes, lambda after: wrong_for(after, models))),
        )
