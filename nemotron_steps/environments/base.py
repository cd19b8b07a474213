"""What a reward environment is.

    row --check_row--> ok | DataError
    row --seed--> Session (tools and state)        one per rollout
    policy turn --call_tool--> tool output          as often as the rollout calls tools
    policy turn --follow_up--> next user message    where an environment has several turns; None ends the rollout
    row, Response, Session --verify--> GradeResult  or verify_group for a group; judge_group checks what they gave

An environment is stateless between rollouts: whatever a rollout changes lives in its Session, so one object serves
any number of concurrent rollouts, in the process, in an actor or behind HTTP. It knows nothing of tokens, tensors,
steps or manifests.

`reward is None` exactly when `failure` names why the answer could not be judged: the loop masks such a sample out. An
exception in `verify` is the answer's fault where another answer of its group can be graded: it earns the least, with
the component GRADER_FAILED. What fails for all of them, and what is the machine's (a lost process, a judge that is not
there, a full disk), is a failure of the rollout, counted and reported with its row and traceback, and not the end of
the run.

`verify` runs on the event loop that every rollout shares. A grader that an answer could make slow belongs in a
helper process (`in_helper`), blocking input and output in a thread.
"""

from __future__ import annotations

import asyncio
import errno
import math
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from nemotron_steps.deprecated import renamed
from nemotron_steps.environments.failures import CannotJudgeError, GraderFailedError, RowError
from nemotron_steps.environments.judged.judge_transcripts import JUDGE_NOTES, noting
from nemotron_steps.environments.judged.judges import JudgeLostError
from nemotron_steps.environments.responses import Response, ToolCall, text_of
from nemotron_steps.errors import (
    ConfigError,
    DataError,
    JudgeUnavailableError,
    StepsError,
    WorkerLostError,
    show_line,
)
from nemotron_steps.rows.layouts import read_request
from nemotron_steps.rows.messages import decoded, flat, read_tools, wrong

if TYPE_CHECKING:
    from nemotron_steps.environments.grading_pool import GradingPool
    from nemotron_steps.environments.judged.judges import Judge

__all__ = [
    "AgentRun",
    "CannotJudgeError",
    "Environment",
    "EnvironmentConfig",
    "GradeResult",
    "GraderFailedError",
    "Response",
    "Row",
    "RowError",
    "Session",
    "ToolCall",
]

Row = Mapping[str, Any]

JUDGE_UNAVAILABLE = "judge_unavailable"
REWARD_OUT_OF_RANGE = "reward_out_of_range"
VERDICT_INVALID = "verdict_invalid"
"""Failure class: `verify` did not return a GradeResult, or its reward or a component is not a finite float32."""
VERIFY_FAILED = "verify_failed"
VERIFIER_TIMEOUT = "verifier_timeout"
VERIFIER_CRASHED = "verifier_crashed"
ENVIRONMENT_LOST = "environment_lost"

FLOAT32_MAX = 3.4028234663852886e38
"""Largest finite float32. Advantages become float32: a number beyond it would be an infinite loss."""

GRADER_FAILED = "grader_failed"
"""Component, 1: grading ended with an error that the answer is to blame for; `failure` in the details is its class."""

_TRACEBACK_CHARACTERS = 4000
_OF_THE_MACHINE = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM}


class EnvironmentConfig(BaseModel):
    """Settings of one environment. Subclasses add fields; an unknown key is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_steps: int | None = Field(None, ge=1)
    """Assistant turns of a rollout at most; None: grpo.max_rollout_turns."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the policy's chat template for these rows, like enable_thinking; a row's own go before them."""


@dataclass(frozen=True)
class GradeResult:
    """The outcome of judging one rollout.

    Attributes:
        reward: a number inside the environment's reward_range, or None when `failure` is set.
        components: named parts and diagnostics, logged as metrics.
        failure: snake_case class of why no judgement was possible, else None.
        details: free text a person may want to read next to the sample (extracted answer, compiler message). What a
            judge said is under "judge" (judged/judge_transcripts.py), and is shown with the sample in the report.
    """

    reward: float | None
    components: dict[str, float] = field(default_factory=dict)
    failure: str | None = None
    details: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.reward is None) != (self.failure is not None):
            raise ValueError(f"a verdict has a reward or a failure, not both or neither: {self!r}")
        if self.reward is not None and not _is_finite(self.reward):
            raise InvalidVerdictError(f"reward must be a finite float32, found {text_of(self.reward, 200, repr)}")
        strange = {name: value for name, value in self.components.items() if not _is_finite(value)}
        if strange:
            raise InvalidVerdictError(f"components must be finite float32 numbers, found {text_of(strange, 200, repr)}")

    @classmethod
    def failed(cls, failure: str, **details: Any) -> GradeResult:
        """A verdict that no judgement was possible."""
        return cls(None, {}, failure, details)

    @classmethod
    def of_error(cls, error: Exception, failure: str = VERIFY_FAILED) -> GradeResult:
        """A verdict that an exception prevented the judgement; `failure` is for one without a class of its own."""
        if isinstance(error, JudgeUnavailableError):
            hint = next(iter(error.hints), None)
            return cls.failed(JUDGE_UNAVAILABLE, message=error.what, found=error.found, hint=hint)
        if isinstance(error, CannotJudgeError):
            return cls.failed(error.failure, message=error.message, **({"hint": error.hint} if error.hint else {}))
        if isinstance(error, InvalidVerdictError):
            failure = VERDICT_INVALID
        elif isinstance(error, WorkerLostError):
            failure = ENVIRONMENT_LOST
        trace = "".join(traceback.format_exception(error))[-_TRACEBACK_CHARACTERS:]
        return cls.failed(failure, message=f"{type(error).__name__}: {error}", traceback=trace)


@dataclass(frozen=True)
class AgentRun:
    """A rollout that an environment ran itself (`Environment.runs_agent`).

    Attributes:
        output: Responses output items; those the policy wrote carry the endpoint's token fields.
        verdict: how it went.
        truncated: the agent's last turn was cut.
    """

    output: list[dict[str, Any]]
    verdict: GradeResult
    truncated: bool = False


class InvalidVerdictError(ConfigError):
    """A verdict with a number that is not finite."""


class NoVerdictError(InvalidVerdictError):
    """Not a GradeResult at all. The class has to be fixed, whatever was answered."""


@dataclass
class Session:
    """State of one rollout. `tools` are function tools in the Responses shape, offered to the policy."""

    tools: list[dict[str, Any]] = field(default_factory=list)
    state: Any = None


class Environment(ABC):
    """Base class of every reward environment.

    Class attributes a subclass sets:
        name: registry name.
        reward_range: inclusive (low, high) of every reward it gives.
        usual_range: (low, high) between which rewards lie but for bonuses and penalties; None: reward_range.
        required_fields: dotted paths a row must have besides the prompt.
        config_class: pydantic model of its settings.
        judges_groups: verify_group must see all rollouts of a prompt at once; one alone cannot be judged.
        runs_agent: run_agent runs whole rollouts against the policy's endpoint; nothing else is asked.
    """

    name: ClassVar[str]
    reward_range: tuple[float, float] = (0.0, 1.0)
    usual_range: tuple[float, float] | None = None
    required_fields: ClassVar[tuple[str, ...]] = ()
    config_class: ClassVar[type[EnvironmentConfig]] = EnvironmentConfig
    judges_groups: ClassVar[bool] = False
    runs_agent: ClassVar[bool] = False

    def __init__(self, config: EnvironmentConfig, judges: Mapping[str, Judge]) -> None:
        self.config = config
        self.judges = dict(judges)
        self._pools: dict[Callable[..., Any], GradingPool] = {}
        self._setup()

    def _setup(self) -> None:  # noqa: B027  an optional hook
        """Make what the settings ask for: called once, at the end of `__init__`, with `config` and `judges` there."""

    @classmethod
    def needs(cls, config: Any, row: Row | None = None) -> tuple[str, ...]:
        """What grading needs of the machine under these settings, of a row if one is given: names of NEEDS
        (`runs/prerequisites.py`), or of programs on PATH."""
        return ()

    def needed_judges(self) -> tuple[str, ...]:
        """Roles of the judges that must be given under the present settings."""
        return ()

    async def start(self) -> None:  # noqa: B027  an optional hook
        """Check that what the environment needs is there (sandbox, servers). Called once before the first rollout."""

    async def close(self) -> None:
        """Release what start acquired, and end the helper processes."""
        for pool in self._pools.values():
            await pool.close()

    async def in_helper(self, grade: Callable[..., Any], *arguments: Any, size: int = 2, cpu_s: float = 10.0) -> Any:
        """What a top-level function returns in a helper process, see GradingPool: for graders that an answer could make
        slow.

        Args:
            size: helper processes for this function.
            cpu_s: seconds of processor time of one call.
        """
        if grade not in self._pools:
            from nemotron_steps.environments.grading_pool import GradingPool

            self._pools[grade] = GradingPool(grade, size=size, cpu_s=cpu_s)
        return await self._pools[grade].call(*arguments)

    def check_row(self, row: Row, where: str) -> None:
        """DataError for a row the environment could not score; `where` is its "file:line"."""
        prompt = "responses_create_params.input"
        self._name_row(self._check_fields, row, where)
        if read_request(row, where).messages[-1]["role"] == "assistant" and not self.runs_agent:
            expected = "a user's or a tool's message last; say there how the answer is to begin"
            raise wrong("must not end with an assistant message", where, prompt, expected=expected)
        self._name_row(self.check_values, row, where)

    def check_row_with_resources(self, row: Row, where: str) -> None:
        """check_row, and what only the run's own settings can tell: before the first rollout of a run."""
        self.check_row(row, where)
        self._name_row(self.check_resources, row, where)

    def _check_fields(self, row: Row) -> None:
        required = ("responses_create_params.input", *self.required_fields)
        for path in required:
            if lookup(row, path) is None:
                there = f"fields: {', '.join(sorted(row)) or 'none'}"
                raise RowError(path, f"values at: {', '.join(required)}", there)

    def _name_row(self, check: Callable[[Row], None], row: Row, where: str) -> None:
        try:
            check(row)
        except RowError as error:
            raise DataError(
                f"row has an unusable `{error.field_name}` for environment `{self.name}`",
                where=f"{where} field {error.field_name}",
                expected=error.expected,
                found=error.found,
                hints=show_line(where),
            ) from error

    def check_values(self, row: Row) -> None:  # noqa: B027  an optional hook
        """Hook: raise RowError when a present field has a value that cannot be scored."""

    def check_resources(self, row: Row) -> None:  # noqa: B027  an optional hook
        """Hook: raise RowError when what the environment is configured with (databases) does not fit the row. Not asked
        while data is prepared."""

    async def seed(self, row: Row) -> Session:
        """Start a rollout: its tools (default: those of the row) and fresh state."""
        return Session(tools=self.tools_of(row))

    def tools_of(self, row: Row) -> list[dict[str, Any]]:
        """The tools that the policy is offered for a row (default: the row's own), as far as they are known before a
        rollout begins: a policy whose chat template does not write tools is refused then."""
        offered = decoded(row["responses_create_params"]).get("tools")
        return [flat(tool) for tool in read_tools(offered, "row", "responses_create_params.tools")]

    async def seed_recorded(self, row: Row) -> Session:
        """The session of a rollout that is over and whose tools were called elsewhere (default: as seed). Where calls
        change what is judged, `verify` has to find them in the response."""
        return await self.seed(row)

    async def call_tool(self, session: Session, name: str, arguments: dict[str, Any]) -> str:
        """Run one tool call of the policy and return its output. A model's mistake is an output that says so,
        never an exception."""
        return f"error: tool `{name}` cannot be executed in environment `{self.name}`"

    async def follow_up(self, row: Row, response: Response, session: Session) -> str | None:
        """The user message that answers an assistant turn without tool calls, or None when the rollout is over.
        Multi-turn environments override this; they bound the number of turns themselves."""
        return None

    async def run_agent(self, row: Row, sampling: dict[str, Any]) -> AgentRun:
        """Run one whole rollout against the policy's endpoint (only where `runs_agent`).

        Args:
            sampling: temperature, top_p and max_output_tokens of every request to the policy.
        """
        raise NotImplementedError(f"environment `{self.name}` runs no agents")

    @abstractmethod
    async def verify(self, row: Row, response: Response, session: Session) -> GradeResult:
        """Judge one finished rollout: `GradeResult(reward)` with a reward in `reward_range`, never a bare number.

        May raise CannotJudgeError or JudgeUnavailableError instead of giving a verdict: a failed verdict. Any other
        exception is one too, unless the answer is to blame (see the module docstring).
        """

    async def verify_group(
        self, row: Row, responses: Sequence[Response], sessions: Sequence[Session]
    ) -> list[GradeResult]:
        """Judge all rollouts of one prompt, in order. Environments that judge groups override this."""
        return list(await asyncio.gather(*(self._guarded(row, r, s) for r, s in zip(responses, sessions, strict=True))))

    async def judge_group(
        self, row: Row, responses: Sequence[Response], sessions: Sequence[Session]
    ) -> list[GradeResult]:
        """verify_group, and its verdicts checked: what callers use.

        Where verify_group raises over some answers, the others are judged without them. An answer is to blame for an
        error if another one of the group was graded, and one that is alone for VERIFIER_TIMEOUT: it earns the low end
        of the range; where that is infinite 0, or what the worst of the others earns if less.
        """
        verdicts = await self._group(row, responses, sessions)
        rewards = [verdict.reward for verdict in verdicts if verdict.reward is not None]
        low = self.reward_range[0] if math.isfinite(self.reward_range[0]) else min([0.0, *rewards])

        def final(verdict: GradeResult) -> GradeResult:
            if GRADER_FAILED not in verdict.components or verdict.failure is None:
                return verdict
            if rewards or (len(verdicts) == 1 and verdict.failure == VERIFIER_TIMEOUT):
                details = {"failure": verdict.failure, **verdict.details}
                return GradeResult(low, verdict.components, details=details)
            return replace(verdict, components={})

        return [final(verdict) for verdict in verdicts]

    async def _group(self, row: Row, responses: Sequence[Response], sessions: Sequence[Session]) -> list[GradeResult]:
        try:
            verdicts = await self.verify_group(row, responses, sessions)
        except JudgeLostError:
            raise
        except Exception as error:
            failed = _failed_over(error)
            if GRADER_FAILED not in failed.components or len(responses) == 1:
                return [failed] * len(responses)
            pairs = list(zip(responses, sessions, strict=True))
            alone = [(await self._group(row, [each], [session]))[0] for each, session in pairs]
            good = [pair for pair, verdict in zip(pairs, alone, strict=True) if GRADER_FAILED not in verdict.components]
            if len(good) == len(pairs):  # they fail together alone
                return [GradeResult.of_error(error)] * len(responses)
            rest = iter(await self._group(row, [each for each, _ in good], [s for _, s in good]) if good else ())
            return [verdict if GRADER_FAILED in verdict.components else next(rest) for verdict in alone]
        if not isinstance(verdicts, list) or len(verdicts) != len(responses):
            raise self._broken("verify_group", f"a list of {len(responses)} verdicts, one a response", verdicts)
        return [self.checked("verify_group", verdict) for verdict in verdicts]

    async def release(self, session: Session) -> None:  # noqa: B027  an optional hook
        """End a rollout: free what its session holds."""

    async def _guarded(self, row: Row, response: Response, session: Session) -> GradeResult:
        try:
            with noting() as begun:
                verdict = self.checked("verify", await self.verify(row, response, session))
        except JudgeLostError:
            raise
        except Exception as error:  # of this rollout alone; whoever collects it reports it
            return _failed_over(error)
        notes = [note for note in begun if note]
        return replace(verdict, details={JUDGE_NOTES: notes, **verdict.details}) if notes else verdict

    def checked(self, method: str, verdict: Any) -> GradeResult:
        """What `method` gave, if it is a verdict with a reward in `reward_range`; else the failure that it is."""
        if not isinstance(verdict, GradeResult):
            raise self._broken(method, "a GradeResult", verdict)
        low, high = self.reward_range
        if verdict.reward is not None and not low <= verdict.reward <= high:
            return GradeResult.failed(REWARD_OUT_OF_RANGE, message=f"reward {verdict.reward} outside [{low}, {high}]")
        return verdict

    def _broken(self, method: str, expected: str, found: Any) -> NoVerdictError:
        return NoVerdictError(
            f"`{method}` of environment `{self.name}` returned something else than {expected}",
            where=f"{type(self).__module__}:{type(self).__qualname__}.{method}",
            expected=expected,
            found=text_of(found, 200, repr),
            hints=(
                "return GradeResult(reward)   # from nemotron_steps.environments.base; reward in reward_range",
                'raise CannotJudgeError("failure_class")   # where no judgement is possible',
            ),
        )


def _failed_over(error: Exception) -> GradeResult:
    """The failure of an error; with GRADER_FAILED where an answer can have brought it about."""
    verdict = GradeResult.of_error(error)
    if not isinstance(error, GraderFailedError) and type(error) is not InvalidVerdictError:
        machines = StepsError | CannotJudgeError | RowError | ConnectionError | TimeoutError
        if isinstance(error, machines) or (isinstance(error, OSError) and error.errno in _OF_THE_MACHINE):
            return verdict
    return replace(verdict, components={GRADER_FAILED: 1.0})


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, Real) and math.fabs(value) <= FLOAT32_MAX
    except OverflowError:  # an integer beyond every float
        return False


def lookup(row: Row, path: str) -> Any:
    """Value at a dotted path, None when any part is absent."""
    value: Any = row
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


__getattr__ = renamed(__name__, {"Verdict": "GradeResult"})
