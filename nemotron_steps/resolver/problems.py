"""Everything that can be wrong with a chain, each with a code of its own; PlanError (E300) carries them all."""

from collections.abc import Sequence
from typing import Any

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


class TypeMismatch(PlanProblem, code="E301"):
    """An artifact of one type is fed to a port of an unrelated type."""


class WrongDirection(TypeMismatch, code="E302"):
    """A port wants a narrower type than it is given."""


class MissingInput(PlanProblem, code="E303"):
    """Nothing feeds a required port."""


class AttributeConflict(PlanProblem, code="E304"):
    """Inputs disagree on an attribute, or an input is not what its port needs."""


class UnknownPort(PlanProblem, code="E305"):
    """No such port or stage."""


class AmbiguousSource(PlanProblem, code="E306"):
    """Several artifacts could feed a port."""


class PlaceholderValue(PlanProblem, code="E307"):
    """A value still has to be filled in."""


class ParameterProblem(PlanProblem, code="E308"):
    """A parameter does not exist in the step's config, or its value is none of its choices."""


class BatchSizeProblem(PlanProblem, code="E309"):
    """Batch sizes that do not divide."""


class LayoutProblem(PlanProblem, code="E310"):
    """A parallel layout that does not fit the GPUs."""


class SourceCycle(PlanProblem, code="E311"):
    """A step's inputs come, in the end, from itself."""


class AbsentInput(ArtifactError):
    """What a port is to be given, or a model's weights, is not here; it may be where the step will run."""


FILLABLE = (MissingInput, PlaceholderValue, AbsentInput)
"""What a plan that is only looked at may lack."""


class ModelLimitProblem(PlanProblem, code="E312"):
    """A model lacks the positions, or the chat template, for what is asked of it."""


class MemoryProblem(PlanProblem, code="E313"):
    """A GPU has less memory than the parts on it take."""


def raise_all(problems: Sequence[StepsError], what: str) -> None:
    """Raise nothing, or one PlanError that carries every problem."""
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise PlanError(f"{what}: {count}, nothing was run", problems=problems)
