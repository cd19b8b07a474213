"""One error tree. Every error carries a stable code, what happened, where, and hints to paste.

RequestError (exit 2): the request is wrong, nothing ran. StepFailedError (1): the step ran and failed. RetryableError
(3): trying again may help. InterruptedRunError (130): Ctrl-C or SIGTERM. explanations.toml says why each is raised.
"""

import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

RESUME = "steps run --resume latest"
"""In a hint of what knows no run: of the newest one. Whoever knows the run puts its id there (`of_run`)."""
_POINTER = b"version https://git-lfs"
"""How a file begins that git-lfs has put in place of a large one."""


class StepsError(Exception):
    """Root of every error this package raises on purpose.

    Args:
        what: one sentence saying what is wrong.
        where: file:line, chain, key or port the error is about.
        expected: what would have been accepted.
        found: what was there instead.
        hints: commands or overrides that can be pasted, most useful first.
    """

    code: ClassVar[str] = "E000"
    exit_code: ClassVar[int] = 1

    def __init_subclass__(cls, code: str | None = None, exit_code: int | None = None) -> None:
        cls.code = code or cls.code
        cls.exit_code = exit_code or cls.exit_code

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        expected: str | None = None,
        found: str | None = None,
        hints: Sequence[str] = (),
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.expected = expected
        self.found = found
        self.hints = tuple(hints)

    def __str__(self) -> str:
        return self.render()

    def __reduce__(self) -> tuple[Any, ...]:
        # Keyword-only arguments would otherwise be lost when an error crosses a process boundary.
        return (_rebuild, (type(self), self.what), self.__dict__.copy())

    def render(self) -> str:
        """The error as plain text: code and sentence, then where, expected, found and hints."""
        lines = [f"error[{self.code}]: {self.what}"]
        for label, text in (("-->", self.where), ("expected:", self.expected), ("found:   ", self.found)):
            if text is not None:
                lines.append(f"  {label} {text}")
        lines.extend(f"  hint: {hint}" for hint in self.hints)
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The error as JSON-serialisable fields, for `--json` and the event journal."""
        said = {key: getattr(self, key) for key in ("what", "where", "expected", "found")}
        return {"code": self.code, "class": type(self).__name__, **said, "hints": list(self.hints)}


def of_run(error: StepsError, run: str) -> StepsError:
    """The error, with the run's id in hints that go on with one."""
    error.hints = tuple(hint.replace(RESUME, f"steps run --resume {run}") for hint in error.hints)
    return error


def _at_line(where: str | None, command: str) -> tuple[str, ...]:
    """A hint: a command for the file and the line that an error is about; none unless it is `file:line`."""
    path, _, line = (where or "").rpartition(":")
    said = command.format(path=path, file=shlex.quote(path), line=line)
    return (said,) if path and line.isdigit() else ()


def show_line(where: str) -> tuple[str, ...]:
    """A command that prints the row an error is about, as a hint; none where `where` is not `file:line`."""
    remote = where.startswith(("http://", "https://"))
    shown = "curl -sL {file} | sed -n {line}p" if remote else "sed -n {line}p {file}"
    return _at_line(where, f"{shown}   # the row")


def without_line(where: str) -> tuple[str, ...]:
    """A command that takes the line an error is about out of its file, as a hint; none unless it is `file:line`."""
    return _at_line(where, "sed -i.bak {line}d {file}   # takes it out; {path}.bak stays")


def renamed_key(where: str | None, wrong: str, right: str = "") -> tuple[str, ...]:
    """A command that corrects a misspelt key in the line that an error is about, as a hint; none without a line, or
    without a key that is the wrong one misspelt (`config.names.meant`): another may mean another thing."""
    plain = re.fullmatch(r"[\w-]+ [\w-]+", f"{wrong} {right}")
    return _at_line(where, f"sed -i '{{line}}s/\\b{wrong}\\b/{right}/' {{file}}   # corrects the key") if plain else ()


def fetch_again(folder: Path, broken: Path | None = None) -> tuple[str, ...]:
    """A command that completes a model folder, as a hint: a large file that is only git-lfs's pointer is fetched by
    that, everything else from the hub."""
    start = b""
    with suppress(OSError):  # what cannot be read is why this is asked
        if broken is not None and broken.is_file():
            with broken.open("rb") as file:
                start = file.read(len(_POINTER))
    if start == _POINTER:
        return (f"git -C {shlex.quote(str(folder))} lfs pull   # the file is only a pointer to its content",)
    return (f"hf download MODEL --local-dir {shlex.quote(str(folder))}   # fetches what is missing or broken",)


def first_line(error: BaseException) -> str:
    """What an exception of a library says, in a line; its type where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def did_you_mean(names: Sequence[str]) -> tuple[str, ...]:
    """The hint of names that are near to one that does not exist; none without any."""
    return (f"did you mean {' or '.join(map(repr, names))}?",) if names else ()


def _rebuild(cls: type[StepsError], what: str) -> StepsError:
    error = cls.__new__(cls)  # whose constructor may want other arguments
    Exception.__init__(error, what)
    return error


class RequestError(StepsError, code="E010", exit_code=2):
    """The request is wrong; nothing ran."""


class ManifestError(RequestError, ValueError, code="E100"):
    """A manifest, types or pipeline file is malformed."""


class UnknownNameError(RequestError, LookupError, code="E110"):
    """No step, type, pipeline, artifact or run has that name."""


class _ManyProblems(RequestError, ValueError):
    """A request with several mistakes: `problems` holds every one found, not just the first."""

    def __init__(self, what: str, *, problems: Sequence[StepsError] = (), **kwargs: Any) -> None:
        super().__init__(what, **kwargs)
        self.problems = tuple(problems)

    def render(self) -> str:
        """Every problem, then the summary line."""
        return "\n\n".join([*(p.render() for p in self.problems), super().render()])

    def to_dict(self) -> dict[str, Any]:
        """As StepsError.to_dict, with every problem."""
        return {**super().to_dict(), "problems": [p.to_dict() for p in self.problems]}


class ConfigError(_ManyProblems, code="E200"):
    """A config key, value or override is wrong. With several wrong, `problems` holds each as its own error."""


def raise_problems(problems: Sequence[ConfigError], subject: str) -> None:
    """Raise nothing, the only problem, or one ConfigError that carries them all."""
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise ConfigError(f"{len(problems)} mistakes in {subject}", problems=problems)


class PlanError(_ManyProblems, code="E300"):
    """A chain does not type-check. `problems` holds every problem found, not just the first."""


class ArtifactError(RequestError, ValueError, code="E400"):
    """An artifact is missing, corrupt or of the wrong type."""


class DataError(RequestError, ValueError, code="E410"):
    """An input row or file is malformed; `where` names file and line."""


class UnsupportedError(RequestError, RuntimeError, code="E500"):
    """A package, program or feature the request needs is absent on this machine."""


class StepFailedError(StepsError, RuntimeError, code="E601"):
    """The step ran and failed."""


class NonFiniteLossError(StepFailedError, ArithmeticError, code="E600"):
    """The loss or a gradient is NaN or infinite. No weight was changed."""


class StorageError(StepFailedError, code="E610"):
    """Writing failed: disk full, permission denied, object store unreachable."""


class EngineError(StepFailedError, code="E620"):
    """Generation, training or weight synchronisation broke."""


class SandboxError(StepFailedError, code="E630"):
    """The sandbox lets something through, or failed to run."""


class CheckFailedError(StepFailedError, code="E640"):
    """A stage's results are not what its pipeline asks for. They are kept; what reads them did not run."""


class RetryableError(StepsError, RuntimeError, code="E701", exit_code=3):
    """Trying again may help."""


class JudgeUnavailableError(RetryableError, code="E700"):
    """A judge did not answer within its retries. Never turned into a reward."""


class WorkerLostError(RetryableError, code="E710"):
    """A worker, node or server died."""


class StorageUnreachableError(StorageError, RetryableError, code="E720", exit_code=3):
    """The object store that holds the home does not answer, or says that it is busy or broken."""


class InterruptedRunError(StepsError, code="E800", exit_code=130):
    """Ctrl-C or SIGTERM. Whatever was committed stays, and the run can be resumed."""
