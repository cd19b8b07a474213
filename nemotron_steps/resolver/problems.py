"""Everything that can be wrong with a chain, each with a code of its own; PlanError (E300) carries them all."""

from collections.abc import Sequence
from typing import Any, ClassVar, cast

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


def _kind(name: str, code: str, parent: type[PlanProblem] = PlanProblem) -> type[PlanProblem]:
    return cast("type[PlanProblem]", type(name, (parent,), {"code": code, "__module__": __name__}))


TypeMismatch = _kind("TypeMismatch", "E301")
WrongDirection = _kind("WrongDirection", "E302", TypeMismatch)
MissingInput = _kind("MissingInput", "E303")
AttributeConflict = _kind("AttributeConflict", "E304")
UnknownPort = _kind("UnknownPort", "E305")
AmbiguousSource = _kind("AmbiguousSource", "E306")
PlaceholderValue = _kind("PlaceholderValue", "E307")
ParameterProblem = _kind("ParameterProblem", "E308")
BatchSizeProblem = _kind("BatchSizeProblem", "E309")
LayoutProblem = _kind("LayoutProblem", "E310")
SourceCycle = _kind("SourceCycle", "E311")
ModelLimitProblem = _kind("ModelLimitProblem", "E312")
MemoryProblem = _kind("MemoryProblem", "E313")


class AbsentInput(ArtifactError):
    """What a port is to be given, or a model's weights, is not here; it may be where the step will run."""


FILLABLE = (MissingInput, PlaceholderValue, AbsentInput)
"""What a plan that is only looked at may lack."""


def raise_all(problems: Sequence[StepsError], what: str) -> None:
    """Raise nothing, or one PlanError that carries every problem."""
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise PlanError(f"{what}: {count}, nothing was run", problems=problems)
