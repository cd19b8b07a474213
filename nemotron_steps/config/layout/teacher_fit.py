"""Whether the layouts of distillation's teachers fit their models: the policy's layout, or one of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from nemotron_steps.config.layout.facts import ModelFacts
from nemotron_steps.config.layout.mends import mends
from nemotron_steps.config.layout.misfits import Misfit, device_misfits, model_misfits, told
from nemotron_steps.config.layout.sizes import MEGATRON, LayoutSizes
from nemotron_steps.config.layout.teachers import TeacherSizes, teachers_named
from nemotron_steps.errors import ConfigError

_CUTS = ("tensor", "pipeline", "context", "expert", "sequence_parallel")


@dataclass(frozen=True)
class TeacherMisfit:
    """What is wrong with one layout, for one teacher or for several of which it is.

    Attributes:
        names: of these teachers.
        misfits: under the config keys of the layout.
        sizes, models: of the run, and of every teacher whose model is known.
    """

    names: tuple[str, ...]
    misfits: tuple[Misfit, ...]
    sizes: LayoutSizes
    models: Mapping[str, ModelFacts]

    @property
    def who(self) -> str:
        """The teachers, in words."""
        return teachers_named(self.names)

    @property
    def is_apart(self) -> bool:
        """Whether the layout is of the teachers' own devices, and not the policy's."""
        return isinstance(_own(self.sizes, self.names[0]), TeacherSizes)

    @cached_property
    def hints(self) -> tuple[str, ...]:
        """Overrides, each of which mends all of it; of the policy's layout, which may not fit the policy then."""
        return tuple(_mends(self.sizes, self.models, self.names[0])[:2])


def teachers_fit(sizes: LayoutSizes, models: Mapping[str, ModelFacts]) -> bool:
    """Whether every teacher's layout fits its model.

    Args:
        sizes: of the run.
        models: teacher → facts of its model, where that is known.
    """
    return not any(_found(_own(sizes, name), model) for name, model in models.items())


def teacher_misfits(sizes: LayoutSizes, models: Mapping[str, ModelFacts]) -> Iterator[TeacherMisfit]:
    """Teachers whose models their layouts do not fit; arguments as `teachers_fit`'s. What is wrong with a layout is
    told once for all teachers."""
    alike: dict[frozenset[str], dict[str, list[Misfit]]] = {}
    for name, model in models.items():
        if found := _found(_own(sizes, name), model):
            alike.setdefault(frozenset(misfit.key for misfit in found), {})[name] = found
    for teachers in alike.values():
        together = tuple(misfit for found in teachers.values() for misfit in found)
        yield TeacherMisfit(tuple(teachers), together, sizes, models)


def _own(sizes: LayoutSizes, name: str) -> TeacherSizes | LayoutSizes:
    return next((teacher for teacher in sizes.teachers if teacher.name == name), sizes)


def _section(own: TeacherSizes | LayoutSizes) -> str:
    return own.section if isinstance(own, TeacherSizes) else MEGATRON


def _layout(own: TeacherSizes | LayoutSizes) -> LayoutSizes:
    """What of a layout is the teacher's."""
    return LayoutSizes(**{name: getattr(own, name) for name in _CUTS})


def _found(own: TeacherSizes | LayoutSizes, model: ModelFacts) -> list[Misfit]:
    return [replace(each, key=each.key.replace(MEGATRON, _section(own))) for each in model_misfits(_layout(own), model)]


def _mends(sizes: LayoutSizes, models: Mapping[str, ModelFacts], name: str) -> list[str]:
    """Overrides of a teacher's layout, which all teachers of that layout fit then, and the devices of each."""
    own = _own(sizes, name)
    sharing = {other: model for other, model in models.items() if _section(_own(sizes, other)) == _section(own)}

    def accepts(after: LayoutSizes) -> bool:
        cuts = {name: getattr(after, name) for name in _CUTS}
        changed = [replace(each, **cuts) if each.section == _section(own) else each for each in sizes.teachers]
        mended = replace(sizes, **({"teachers": tuple(changed)} if isinstance(own, TeacherSizes) else cuts))
        before = {misfit.what for misfit in device_misfits(sizes)}
        return teachers_fit(mended, sharing) and all(misfit.what in before for misfit in device_misfits(mended))

    return [hint.replace(MEGATRON, _section(own)) for hint in mends(_layout(own), models[name], accepts=accepts)]


def refuse_teacher_misfits(sizes: LayoutSizes, models: Mapping[str, ModelFacts]) -> None:
    """ConfigError for the first layout that does not fit a teacher."""
    for each in teacher_misfits(sizes, models):
        what, expected, found = told(each.misfits)
        raise ConfigError(
            f"{each.who}: {what}",
            where=each.misfits[0].key,
            expected=expected,
            found=found,
            hints=each.hints,
        )
