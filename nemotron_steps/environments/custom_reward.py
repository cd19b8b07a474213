"""reward_function: the weighted sum of what functions of the user's own give.

A function is called with all rollouts of a prompt at once and named by `FILE.py:NAME` or `MODULE:NAME`. Two signatures
are known, by the names of the parameters:

- TRL's: `f(prompts, completions, **columns)`, a list in, a list of numbers out, None where it has nothing to say.
  `prompts` and `completions` are texts where the row's prompt is a text, else lists of messages. `columns` are the
  row's other fields, each as a list as long as `completions`.
- verl's: `f(data_source, solution_str, ground_truth, extra_info)`, one number (or a dict with `score`) for one answer.

Either may be asynchronous. Functions run in helper processes, so that a slow one does not keep the rollouts waiting.
They are the user's own code and not sandboxed: one that runs what the model wrote has to see to that itself.
"""

import asyncio
import hashlib
import importlib
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from nemotron_steps.environments.base import (
    FLOAT32_MAX,
    VERIFIER_CRASHED,
    Environment,
    EnvironmentConfig,
    GradeResult,
    Row,
    Session,
)
from nemotron_steps.environments.failures import GraderFailedError
from nemotron_steps.environments.responses import Response, text_of
from nemotron_steps.errors import ConfigError

_TRAINERS_OWN = frozenset({"completion_ids", "prompt_ids", "trainer_state", "log_extra", "log_metric"})
"""What TRL gives a function besides: tokens and state of its own trainer."""
_VERL = frozenset({"solution_str", "ground_truth"})


class RewardFunction(BaseModel):
    """One function and its share of the reward."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    function: str = Field(pattern=r"^[^:]+:[A-Za-z_][\w.]*$")
    """`FILE.py:NAME`, or `MODULE:NAME` of what is installed."""
    weight: float = 1.0


class RewardFunctionConfig(EnvironmentConfig):
    """Settings."""

    functions: tuple[RewardFunction, ...] = Field(min_length=1)
    """Functions and their weights."""
    timeout_s: PositiveFloat = 60.0
    """Processor time of one call of one function, for all rollouts of a prompt; ten times that by the clock."""
    workers: PositiveInt = 2
    """Helper processes."""


class RewardFunctionEnvironment(Environment):
    """See the module docstring."""

    name: ClassVar[str] = "reward_function"
    reward_range = (-math.inf, math.inf)
    config_class = RewardFunctionConfig
    config: RewardFunctionConfig

    async def start(self) -> None:
        """Load every function here, so that a wrong name is told before the first rollout."""
        for each in self.config.functions:
            _refuse_unfillable(load(each.function), each.function)

    async def verify(self, row: Row, response: Response, session: Session) -> GradeResult:
        (verdict,) = await self.verify_group(row, [response], [session])
        return verdict

    async def verify_group(
        self, row: Row, responses: Sequence[Response], sessions: Sequence[Session]
    ) -> list[GradeResult]:
        texts = [response.text for response in responses]
        columns = {key: value for key, value in row.items() if key not in ("responses_create_params", "agent_ref")}
        prompt = columns.pop("prompt", None) or row["responses_create_params"]["input"]

        async def called(function: str) -> list[float | None]:
            given, limits = (function, prompt, texts, columns), (self.config.workers, self.config.timeout_s)
            try:
                found: list[float | None] = await self.in_helper(call, *given, size=limits[0], cpu_s=limits[1])
            except GraderFailedError as error:
                raise GraderFailedError(error.failure, f"reward={function}: {error.message}") from error
            return found

        rewards = await asyncio.gather(*(called(each.function) for each in self.config.functions))
        return [self._verdict(of_one_answer) for of_one_answer in zip(*rewards, strict=True)]

    def _verdict(self, rewards: tuple[float | None, ...]) -> GradeResult:
        pairs = list(zip(self.config.functions, rewards, strict=True))
        told = {each.function.rpartition(":")[2]: reward for each, reward in pairs if reward is not None}
        if not told:
            return GradeResult.failed("no_reward", message="every reward function gave None")
        total = sum(each.weight * reward for each, reward in pairs if reward is not None)
        if not abs(total) <= FLOAT32_MAX:
            parts = ", ".join(f"{each.weight} * {each.function} {reward}" for each, reward in pairs)
            message = f"the sum of the rewards must be a finite float32, found {total}: {parts}"
            return GradeResult.failed(VERIFIER_CRASHED, message=message)
        return GradeResult(total, told)


def call(function: str, prompt: Any, completions: list[str], columns: dict[str, Any]) -> list[float | None]:
    """Call one function on all answers to a prompt (in a helper process)."""
    loaded, count = load(function), len(completions)
    if set(inspect.signature(loaded).parameters) >= _VERL:
        model = columns.get("reward_model")
        truth = model.get("ground_truth") if isinstance(model, Mapping) else columns.get("ground_truth")
        known = {"data_source": columns.get("data_source"), "extra_info": columns.get("extra_info")}
        rewards: Any = []
        for text in completions:
            given = _called(loaded, {**known, "solution_str": text, "ground_truth": truth})
            if isinstance(given, Mapping) and "score" not in given:
                keys = ", ".join(map(repr, given)) or "no keys"
                raise TypeError(f"{function} gave a dict without 'score': it has {text_of(keys, 200, str)}")
            rewards.append(given["score"] if isinstance(given, Mapping) else given)
    else:
        chat = not isinstance(prompt, str)
        answers = [[{"role": "assistant", "content": text}] for text in completions] if chat else completions
        repeated = {key: [value] * count for key, value in columns.items()}
        rewards = _called(loaded, {**repeated, "prompts": [prompt] * count, "completions": answers})
        rewards = rewards.tolist() if hasattr(rewards, "tolist") else rewards  # an array's, which may have no dimension
        rewards = list(rewards) if isinstance(rewards, Sequence) and not isinstance(rewards, str) else [rewards]
    if len(rewards) != count:
        counts = f"{len(rewards)} rewards for {count} completions"
        raise TypeError(f"{function} gave {counts}: {text_of(rewards, 200, repr)}")
    return [None if reward is None else _number(reward, function) for reward in rewards]


def _called(function: Callable[..., Any], known: dict[str, Any]) -> Any:
    """What a function gives for those of the arguments that it has parameters for; awaited if it is asynchronous."""
    parameters = inspect.signature(function).parameters
    if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
        known = {key: value for key, value in known.items() if key in parameters}
    given = function(**known)
    if not inspect.isawaitable(given):
        return given

    async def wait() -> Any:
        return await given

    return asyncio.run(wait())


def _refuse_unfillable(function: Callable[..., Any], name: str) -> None:
    """ConfigError for a function that wants what only a trainer in its own process has."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # of a function in C that does not say
        return
    required = [each.name for each in parameters if each.default is each.empty and each.name in _TRAINERS_OWN]
    if required:
        plain = name.rpartition(":")[2]
        raise ConfigError(
            f"the reward function takes {' and '.join(required)}, which it is not given",
            where=name,
            expected="texts or messages, and columns of the rows",
            hints=(f"def {plain}(prompts, completions, **columns)",),
        )


def _number(reward: Any, function: str) -> float:
    try:
        number = math.nan if isinstance(reward, str | bytes) else float(reward)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= FLOAT32_MAX:
        told = text_of(reward, 200, repr)
        raise ValueError(f"{function} gave {told}: a reward must be a finite float32 or None")
    return number


def load(function: str) -> Callable[..., Any]:
    """The function of a name."""
    place, _, name = function.rpartition(":")
    try:
        if place.endswith(".py"):
            status = Path(place).stat()
            module: Any = _module_of(Path(place), (status.st_ctime_ns, status.st_size))
        else:
            module = importlib.import_module(place)
    except Exception as error:  # the user's own code may raise anything
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        raise ConfigError(
            f"the reward function's {'file' if place.endswith('.py') else 'module'} does not load",
            where=place,
            found=f"{type(error).__name__}: {error}",
            hints=(*((f"pip install {missing}",) if missing else ()), "reward=FILE.py:FUNCTION"),
        ) from error
    found = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        there = [each for each, value in vars(module).items() if inspect.isfunction(value) and each[0] != "_"]
        raise ConfigError(
            f"there is no function '{name}'" if found is None else f"'{name}' is not a function",
            where=place,
            expected=", ".join(there[:20]) or "a function of that name",
            found=name,
            hints=tuple(f"reward={place}:{each}" for each in there[:3]),
        )
    return found  # type: ignore[no-any-return]


@lru_cache(maxsize=64)
def _module_of(path: Path, stamp: tuple[int, int]) -> Any:
    """A file as a module of its own, loaded again when it changed; what is beside the file can be imported."""
    module = ModuleType(f"reward_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}")
    module.__file__ = str(path.absolute())
    sys.modules[module.__name__] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    # Not through Python's cache, which tells versions of a file apart by whole seconds and sizes alone.
    exec(compile(path.read_bytes(), module.__file__, "exec", dont_inherit=True), vars(module))
    return module
