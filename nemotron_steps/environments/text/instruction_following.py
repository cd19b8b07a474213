"""instruction_following: does the answer follow every verifiable instruction of the row (`binary`), or what fraction
of them (`fraction`)?

The fields are the row's own, or those of its `verifier_metadata`.
"""

import importlib.util
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from nemotron_steps.environments.base import Environment, EnvironmentConfig, GradeResult, Row, RowError, Session
from nemotron_steps.environments.responses import Response
from nemotron_steps.environments.text.instruction_checks import CHECKS, arguments_of
from nemotron_steps.errors import UnsupportedError

LANGUAGE = "language:response_language"


class InstructionFollowingConfig(EnvironmentConfig):
    """Settings."""

    grading_mode: Literal["binary", "fraction"] = "binary"
    """Where the row names none."""


class InstructionFollowing(Environment):
    """See the module docstring."""

    name: ClassVar[str] = "instruction_following"
    config_class = InstructionFollowingConfig
    config: InstructionFollowingConfig

    def check_values(self, row: Row) -> None:
        ids, kwargs = _field(row, "instruction_id_list"), _field(row, "kwargs")
        if not isinstance(ids, list) or not ids:
            raise RowError("instruction_id_list", "at least one instruction id", repr(ids)[:80])
        if not isinstance(kwargs, list) or len(kwargs) != len(ids):
            raise RowError("kwargs", f"a list of {len(ids)} objects or nulls", repr(kwargs)[:80])
        for index, (name, given) in enumerate(zip(ids, kwargs, strict=True)):
            if name not in CHECKS:
                raise RowError(f"instruction_id_list[{index}]", "a known instruction id", repr(name))
            try:
                arguments = arguments_of(CHECKS[name], given)
                if name != LANGUAGE:
                    CHECKS[name]("Well, it is fine.\n\nSo it is.", **arguments)  # arguments of another type
            except (TypeError, ValueError, IndexError, AttributeError, KeyError) as error:
                raise RowError(f"kwargs[{index}]", f"the arguments of {name}", str(error)) from error
            if name == LANGUAGE and importlib.util.find_spec("langdetect") is None:
                message = f"the instruction {LANGUAGE} needs the langdetect package"
                raise UnsupportedError(message, hints=("pip install langdetect",))
        mode = _field(row, "grading_mode")
        if mode not in (None, "binary", "fraction"):
            raise RowError("grading_mode", "binary or fraction", repr(mode))

    async def verify(self, row: Row, response: Response, session: Session) -> GradeResult:
        followed = {}
        asked = zip(_field(row, "instruction_id_list"), _field(row, "kwargs"), strict=True)
        for index, (name, given) in enumerate(asked):
            kept = bool(response.text.strip()) and CHECKS[name](response.text, **arguments_of(CHECKS[name], given))
            followed[f"{index}:{name}"] = float(kept)
        fraction = sum(followed.values()) / len(followed)
        mode = _field(row, "grading_mode") or self.config.grading_mode
        reward = fraction if mode == "fraction" else float(fraction == 1.0)
        return GradeResult(reward, {"followed": fraction}, details={"instructions": followed})


def _field(row: Row, name: str) -> Any:
    """A verifier field, which newer public rows keep under `verifier_metadata` and older ones at the top."""
    metadata = row.get("verifier_metadata")
    inside = metadata.get(name) if isinstance(metadata, Mapping) else None
    return row.get(name) if inside is None else inside
