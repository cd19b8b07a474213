"""Everything that can be wrong with a chain, each with a code of its own; PlanError (E300) carries them all."""

from collections.abc import Sequence
from typing import Any, ClassVar

from nemotron_steps.errors import ArtifactError, PlanError, StepsError

ROWS = {
    "rl_prompts": '{"prompt": "What is 1 + 1?", "answer": "2"}',
    "sft_chats": '{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}',
    "packed_chats": '{"input_ids": [5, 7, 2], "loss_mask": [0, 1, 0], "seq_start_id": [0]}',
    "preference_pairs": '{"prompt": "…", "chosen": "…", "rejected": "…"}',
}
"""What one row of a data set of each type looks like."""


class PlanProblem(PlanError):
    """One thing wrong with a chain. `chain` names the steps and ports involved, first to last."""

    code: ClassVar[str] = "E300"

    def __init__(self, what: str, *, chain: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(what, **kwargs)
        self.chain = tuple(chain)

    def render(self) -> str:
        """As StepsError.render, with the chain under the sentence."""
        lines = StepsError.render(self).split("\n")
        if self.chain:
            lines.insert(1, f"  chain:    {' → '.join(self.chain)}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """As StepsError.to_dict, with the chain."""
        return {**StepsError.to_dict(self), "chain": list(self.chain)}


class TypeMismatch(PlanProblem):
    """An artifact of one type is fed to a port of an unrelated type."""

    code = "E301"


class WrongDirection(TypeMismatch):
    """A port wants a narrower type than it is given."""

    code = "E302"


class MissingInput(PlanProblem):
    """Nothing feeds a required port."""

    code = "E303"


class AttributeConflict(PlanProblem):
    """Inputs disagree on an attribute, or an input is not what its port needs."""

    code = "E304"


class UnknownPort(PlanProblem):
    """No such port or stage."""

    code = "E305"


class AmbiguousSource(PlanProblem):
    """Several artifacts could feed a port."""

    code = "E306"


class PlaceholderValue(PlanProblem):
    """A value still has to be filled in."""

    code = "E307"


class ParameterProblem(PlanProblem):
    """A parameter does not exist in the step's config, or its value is none of its choices."""

    code = "E308"


class BatchSizeProblem(PlanProblem):
    """Batch sizes that do not divide."""

    code = "E309"


class LayoutProblem(PlanProblem):
    """A parallel layout that does not fit the GPUs."""

    code = "E310"


class SourceCycle(PlanProblem):
    """A step's inputs come, in the end, from itself."""

    code = "E311"


class AbsentInput(ArtifactError):
    """What a port is to be given, or a model's weights, is not here; it may be where the step will run."""


FILLABLE = (MissingInput, PlaceholderValue, AbsentInput)
"""What a plan that is only looked at may lack."""


class ModelLimitProblem(PlanProblem):
    """A model lacks the positions, or the chat template, for what is asked of it."""

    code = "E312"


class MemoryProblem(PlanProblem):
    """A GPU has less memory than the parts on it take."""

    code = "E313"


def raise_all(problems: Sequence[StepsError], what: str) -> None:
    """Raise nothing, or one PlanError that carries every problem."""
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise PlanError(f"{what}: {count}, nothing was run", problems=problems)
