"""math_formal_lean: 1 if Lean 4 accepts the proof of the row's own statement, with no `sorry` and no new axiom; up to
`max_corrections` further turns show the compiler's message.

Lean and its project (Mathlib built) are not part of this package: the sandbox must have them, by default a project
folder shown read-only, or an image.
"""

from __future__ import annotations

import os
import re
import shutil
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from nemotron_steps.environments.base import (
    CannotJudgeError,
    Environment,
    EnvironmentConfig,
    Response,
    Row,
    RowError,
    Session,
    Verdict,
)
from nemotron_steps.environments.text.extraction import fenced_blocks
from nemotron_steps.errors import UnsupportedError
from nemotron_steps.sandbox import Limits, Outcome, create_sandbox
from nemotron_steps.sandbox.base import MIB

if TYPE_CHECKING:
    from nemotron_steps.environments.judged.judges import Judge

LEAN_TAGS = (frozenset({"lean", "lean4"}), frozenset({"tactics"}), frozenset({""}))
"""Tags of the blocks a proof is looked for in: those of a later set only where there is none of an earlier."""
LEAN_TIMEOUT = "lean_timeout"
"""Failure class: Lean did not finish, so whether the proof holds is unknown."""

_COMMENT_BEGIN = re.compile(r"--[^\n]*|/-")
_COMMENT_MARK = re.compile(r"/-|-/")
_NOT_NEWLINE = re.compile(r"[^\n]+")
_HEAD = re.compile(r"^[^\S\n]*(?:@\[[^\]\n]*\][^\S\n]*)?(?:theorem|lemma|example)\b", re.MULTILINE)
_FORBIDDEN = re.compile(
    r"\b(?:sorry|admit|axiom|constant|native_decide|unsafe|implemented_by|extern)\b|#eval|\brun_cmd\b"
)
_BY = re.compile(r":=\s*by\b")
_PROOF_BEGIN = re.compile(r"\s*+(?::=|(?=by\b))")
_BODY = re.compile(r"[(\[{⟨]|[)\]}⟩]|:=")


class MathFormalLeanConfig(EnvironmentConfig):
    """Settings."""

    max_corrections: int = Field(0, ge=0, le=2)
    """Further turns after a proof that Lean does not accept."""
    lean_project: str | None = None
    """Folder of a built Lake project with the libraries that the rows import."""
    lean_timeout_s: float = Field(300.0, gt=0.0)
    """Of one proof."""
    lean_memory_mib: int = Field(16384, gt=0)
    """Of one Lean process."""
    sandbox: str = "bubblewrap"
    """Where Lean runs: a name of the sandbox registry, such as bubblewrap or docker."""
    sandbox_image: str | None = None
    """Container image with Lean, for a sandbox that has images."""


class MathFormalLean(Environment):
    """See the module docstring.

    A row has `header` (imports) and `formal_statement` (the theorem up to `:= by`), texts.
    """

    name: ClassVar[str] = "math_formal_lean"
    required_fields: ClassVar[tuple[str, ...]] = ("header", "formal_statement")
    config_class = MathFormalLeanConfig
    config: MathFormalLeanConfig

    def __init__(self, config: MathFormalLeanConfig, judges: Mapping[str, Judge]) -> None:
        super().__init__(config, judges)
        if config.sandbox_image is not None:
            self.sandbox = create_sandbox(config.sandbox, image=config.sandbox_image)
            self._lake = "lake"
        else:
            self._lake = shutil.which("lake") or ""
            # A toolchain manager's `lake` is a launcher: the toolchains live beside its bin folder.
            shown = [str(Path(os.path.realpath(self._lake)).parent.parent)] if self._lake else []
            shown += [os.path.abspath(config.lean_project)] if config.lean_project else []
            self.sandbox = create_sandbox(config.sandbox, read_only=tuple(shown))

    async def start(self) -> None:
        """Probe the sandbox and compile a trivial proof in it.

        Raises:
            UnsupportedError: Lean is not installed, or does not run there.
        """
        if not self._lake:
            raise UnsupportedError(
                "formal proofs need Lean 4, which is not installed",
                expected="`lake` on PATH and a built project (or a container image with both)",
                found="no `lake` on PATH",
                hints=(
                    "env.math_formal_lean.sandbox=docker env.math_formal_lean.sandbox_image=IMAGE",
                    "https://lean-lang.org/install, then env.math_formal_lean.lean_project=FOLDER",
                ),
            )
        await self.sandbox.start()
        accepted, output = await self._compile("theorem one_is_one : 1 = 1 := by\n  rfl\n")
        if not accepted:
            raise UnsupportedError("Lean 4 is installed but does not run in the sandbox", found=output[-300:])

    async def close(self) -> None:
        """Close the sandbox."""
        await self.sandbox.close()

    def check_values(self, row: Row) -> None:
        """The statement ends where its proof begins."""
        if not _BY.search(str(row["formal_statement"])):
            raise RowError("formal_statement", "a statement up to `:= by`", repr(row["formal_statement"])[-80:])

    async def seed(self, row: Row) -> Session:
        """No correction used yet."""
        return Session(state={"corrections": 0, "last": None})

    async def follow_up(self, row: Row, response: Response, session: Session) -> str | None:
        """The compiler's message, while corrections are left and the proof does not compile."""
        if session.state["corrections"] >= self.config.max_corrections:
            return None
        accepted, message = await self._grade(row, response.text)
        session.state["last"] = (response.text, accepted, message)
        if accepted:
            return None
        session.state["corrections"] += 1
        return f"The proof was not accepted:\n\n{message[-4000:]}\n\nGive the complete corrected Lean 4 code."

    async def verify(self, row: Row, response: Response, session: Session) -> Verdict:
        """1 if the last proof is accepted, else 0."""
        state: dict[str, Any] = session.state or {"corrections": 0, "last": None}
        last = state["last"]
        if last is not None and last[0] == response.text:
            _, accepted, message = last
        else:
            accepted, message = await self._grade(row, response.text)
        components = {"corrections": float(state["corrections"])}
        return Verdict(float(accepted), components, details={"compiler": message[-2000:]})

    async def _grade(self, row: Row, text: str) -> tuple[bool, str]:
        proof = extract_proof(text)
        if proof is None:
            return False, "The answer holds no proof."
        # In a string or a quoted name, a comment's mark is none; where there may be one, comments count as well.
        visible = proof if '"' in proof or "«" in proof else without_comments(proof)
        forbidden = _FORBIDDEN.search(visible)
        if forbidden:
            return False, f"The proof uses `{forbidden.group(0)}`, which is not accepted."
        return await self._compile(assemble(row, proof))

    async def _compile(self, source: str) -> tuple[bool, str]:
        project = os.path.abspath(self.config.lean_project) if self.config.lean_project else None
        command = [self._lake, *(["--dir", project] if project else []), "env", "lean", "/scratch/Proof.lean"]
        result = await self.sandbox.run(
            command,
            files={"Proof.lean": source},
            limits=Limits(
                wall_s=self.config.lean_timeout_s,
                cpu_s=int(self.config.lean_timeout_s) * 4,
                memory_bytes=self.config.lean_memory_mib * MIB,
                open_files=4096,
            ),
        )
        if result.outcome is not Outcome.EXITED:
            raise CannotJudgeError(LEAN_TIMEOUT, result.outcome.value)
        output = result.stdout + result.stderr
        return result.exit_code == 0 and "declaration uses 'sorry'" not in output, output


def extract_proof(text: str) -> str | None:
    """What follows `:=` in the last theorem of the last Lean block (of the whole text, where it has no block).

    Where there is no theorem, the whole is taken for tactics. Only the proof is taken: the statement is the row's, so
    restating an easier one gains nothing. None where nothing is left.
    """
    blocks = fenced_blocks(text)
    tagged = ([content for info, content in blocks if info.lower() in tags] for tags in LEAN_TAGS)
    code = next((found[-1] for found in tagged if found), None if blocks else text)
    if code is None:
        return None
    visible = without_comments(code)
    heads = list(_HEAD.finditer(visible))
    if not heads:
        begun = _PROOF_BEGIN.match(visible)
        if begun is not None:
            return code[begun.end() :].strip() or None
        tactics = textwrap.indent(textwrap.dedent(code.strip("\n")), "  ").rstrip()
        return f"by\n{tactics}" if visible.strip() else None
    depth = 0
    for mark in _BODY.finditer(visible, heads[-1].end()):
        if mark.group() != ":=":
            depth += 1 if mark.group() in "([{⟨" else -1
        elif depth <= 0:
            proof = code[mark.end() :]
            return proof.strip() if without_comments(proof).strip() not in ("", "by") else None
    return None


def without_comments(code: str) -> str:
    """Lean code with its comments, which nest, turned into spaces; every other character keeps its place.

    Strings are not known here: what looks like a comment inside of one is taken for one.
    """
    kept, end = [], 0
    while (comment := _COMMENT_BEGIN.search(code, end)) is not None:
        kept.append(code[end : comment.start()])
        end = comment.end()
        if comment.group() == "/-":
            depth = 1
            for mark in _COMMENT_MARK.finditer(code, end):
                depth += 1 if mark.group() == "/-" else -1
                end = mark.end()
                if depth == 0:
                    break
            else:
                end = len(code)
        kept.append(_NOT_NEWLINE.sub(lambda text: " " * len(text.group()), code[comment.start() : end]))
    return "".join([*kept, code[end:]])


def assemble(row: Row, proof: str) -> str:
    """The row's header and statement with a proof."""
    statement = str(row["formal_statement"])
    match = list(_BY.finditer(statement))[-1]
    return f"{str(row['header']).rstrip()}\n\n{statement[: match.start()]}:= {proof.rstrip()}\n"
