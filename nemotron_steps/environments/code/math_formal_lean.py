"""math_formal_lean: 1 if Lean 4's kernel accepts the answer's proof of the row's own statement, resting on no axiom but
propext, Classical.choice and Quot.sound; up to `max_corrections` further turns show the compiler's message.

One Lean compiles the answer, and what it says is not believed, because an answer may run code there. A second one, in a
sandbox of its own, only reads the module that the first wrote: `proof_check.lean`.

Lean and its project (Mathlib built) are not part of this package: the sandbox must have them, by default a project
folder shown read-only, or an image.
"""

import base64
import math
import os
import re
import shutil
import subprocess
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from nemotron_steps.environments.base import GradeResult, Response, Row, Session
from nemotron_steps.environments.code.sandboxed import SandboxedConfig, SandboxedEnvironment
from nemotron_steps.environments.failures import CannotJudgeError, RowError
from nemotron_steps.environments.text.extraction import fenced_blocks
from nemotron_steps.errors import UnsupportedError
from nemotron_steps.sandbox import Limits, Outcome
from nemotron_steps.sandbox.base import MIB

LEAN_TAGS = (frozenset({"lean", "lean4"}), frozenset({"tactics"}), frozenset({""}))
"""Tags of the blocks a proof is looked for in: those of a later set only where there is none of an earlier."""
LEAN_TIMEOUT = "lean_timeout"
LEAN_FAILED = "lean_failed"
CHECK = Path(__file__).with_name("proof_check.lean")

_COMMENT_BEGIN = re.compile(r"--[^\n]*|/-")
_COMMENT_MARK = re.compile(r"/-|-/")
_NOT_NEWLINE = re.compile(r"[^\n]+")
_HEAD = re.compile(r"^[^\S\n]*(?:@\[[^\]\n]*\][^\S\n]*)?(?:theorem|lemma|example)\b", re.MULTILINE)
_NAMED = re.compile(r"\b(?:theorem|lemma)\s+[^\s:({\[]")
_COMMAND = re.compile(
    r"(?<![\w.«'!?])(?:abbrev|alias|attribute|axiom|class|def|elab|elab_rules|end|example|export|inductive|infix[lr]?"
    r"|initialize|instance|lemma|macro|macro_rules|mutual|namespace|noncomputable|notation|opaque|postfix|prefix|private"
    r"|protected|run_cmd|run_elab|run_meta|section|structure|syntax|theorem|universe|variable)\b(?!['.])"
    r"|^[^\S\n]*(?:@\[|#[a-z]|(?:local|scoped|partial|unsafe)\b|(?:open|set_option)\b(?!.*\bin\b))",
    re.MULTILINE,
)
"""What begins the next command: no proof holds such a word, or begins a line so."""
_BY = re.compile(r":=\s*by\b")
_PROOF_BEGIN = re.compile(r"\s*+(?::=|(?=by\b))")
_BODY = re.compile(r"[(\[{⟨]|[)\]}⟩]|:=")


class MathFormalLeanConfig(SandboxedConfig):
    """Settings."""

    max_corrections: int = Field(0, ge=0, le=2)
    """Further turns after a proof that Lean does not accept."""
    lean_project: str | None = None
    """Folder of a built Lake project with the libraries that the rows import. Without it, `lean` alone is used."""
    lean_timeout_s: float = Field(300.0, gt=0.0)
    """Processor seconds of one Lean process."""
    lean_memory_mib: int = Field(16384, gt=0)
    """Of one Lean process."""


class MathFormalLean(SandboxedEnvironment):
    """See the module docstring.

    A row has `header` (imports) and `formal_statement` (the theorem up to `:= by`), texts.
    """

    name: ClassVar[str] = "math_formal_lean"
    required_fields: ClassVar[tuple[str, ...]] = ("header", "formal_statement")
    config_class = MathFormalLeanConfig
    config: MathFormalLeanConfig

    @classmethod
    def needs(cls, config: Any, row: Row | None = None) -> tuple[str, ...]:
        return (config.sandbox,) if config.sandbox_image else (config.sandbox, "lean")

    def _setup(self) -> None:
        folder = os.path.abspath(self.config.lean_project) if self.config.lean_project else None
        launcher = None if self.config.sandbox_image else shutil.which("lean")
        prefix = ""
        if launcher and (folder is None or os.path.isdir(folder)):
            # It may be a toolchain manager's, which needs the home folder; the toolchain itself does not.
            told = subprocess.run([launcher, "--print-prefix"], cwd=folder, capture_output=True, text=True)
            prefix = told.stdout.strip()
        shown = tuple(filter(None, (prefix, folder)))
        image = self.config.sandbox_image
        self._make_sandbox(**({} if image else {"read_only": shown}))
        self._found = bool(prefix or image)
        tools = f"{prefix}/bin/" if prefix else ""
        self._lean = [f"{tools}lake", "--dir", folder, "env", f"{tools}lean"] if folder else [f"{tools}lean"]
        self._stated: dict[str, bytes] = {}

    async def start(self) -> None:
        found = "no `lean` on PATH, or no folder `lean_project`"
        if self._found:
            await self.sandbox.start()
            row = {"header": "", "formal_statement": "theorem of_itself (p : Prop) (h : p) : p := by"}
            try:
                accepted, found = await self._compile(row, "h")
            except CannotJudgeError as error:
                accepted, found = False, str(error)
            if accepted:
                return
        raise UnsupportedError(
            "formal proofs need Lean 4, which is not installed or does not run in the sandbox",
            expected="`lean`, 4.12 or newer, and a built project where rows import one (or an image with both)",
            found=found[-300:],
            hints=(
                "env.math_formal_lean.sandbox=docker env.math_formal_lean.sandbox_image=IMAGE",
                "https://lean-lang.org/install, then env.math_formal_lean.lean_project=FOLDER",
            ),
        )

    def check_values(self, row: Row) -> None:
        statement = str(row["formal_statement"])
        if not (_NAMED.search(without_comments(statement)) and _BY.search(statement)):
            raise RowError("formal_statement", "a theorem with a name, up to `:= by`", repr(statement)[-80:])

    async def seed(self, row: Row) -> Session:
        return Session(state={"corrections": 0, "last": None})

    async def follow_up(self, row: Row, response: Response, session: Session) -> str | None:
        if session.state["corrections"] >= self.config.max_corrections:
            return None
        accepted, message = await self._grade(row, response.text)
        session.state["last"] = (response.text, accepted, message)
        if accepted:
            return None
        session.state["corrections"] += 1
        return f"The proof was not accepted:\n\n{message[-4000:]}\n\nGive the complete corrected Lean 4 code."

    async def verify(self, row: Row, response: Response, session: Session) -> GradeResult:
        state: dict[str, Any] = session.state or {"corrections": 0, "last": None}
        text, *graded = state["last"] or (None,)
        accepted, message = graded if text == response.text else await self._grade(row, response.text)
        components = {"corrections": float(state["corrections"])}
        return GradeResult(float(accepted), components, details={"compiler": message[-2000:]})

    async def _grade(self, row: Row, text: str) -> tuple[bool, str]:
        """(whether Lean accepts the proof in a text, what it says)"""
        proof = extract_proof(text)
        return (False, "The answer holds no proof.") if proof is None else await self._compile(row, proof)

    async def _compile(self, row: Row, proof: str) -> tuple[bool, str]:
        source = assemble(row, "sorry")
        stated = self._stated.get(source)
        if stated is None:
            stated, output = await self._module(source)
            if stated is None:
                raise CannotJudgeError(LEAN_FAILED, output[-300:])
            self._stated = {source: stated}  # the row's other answers follow
        given, output = await self._module(assemble(row, proof))
        if given is None:
            return False, output
        files = {"Stated.olean": stated, "Given.olean": given, CHECK.name: CHECK.read_bytes()}
        passed, _, why = await self._run([*self._lean, "--run", CHECK.name], files)
        return passed, output if passed else f"{output}{why}"

    async def _module(self, source: str) -> tuple[bytes | None, str]:
        """What Lean makes of a file, None if nothing, and what it says."""
        # Both modules have the file's name: names of private declarations hold it.
        command = ["/bin/sh", "-c", '"$@" >&2 && exec base64 Proof.olean', "sh", *self._lean]
        passed, module, output = await self._run([*command, "-o", "Proof.olean", "Proof.lean"], {"Proof.lean": source})
        try:
            return (base64.b64decode(module) if passed else None), output
        except ValueError as error:
            return None, f"{output}{error}"

    async def _run(self, command: list[str], files: Mapping[str, str | bytes]) -> tuple[bool, str, str]:
        """Whether it exits with 0, and its two outputs. What it used up of its own is its fault; waiting is not."""
        limits = Limits(
            wall_s=self.config.lean_timeout_s * 4,
            cpu_s=math.ceil(self.config.lean_timeout_s),
            memory_bytes=self.config.lean_memory_mib * MIB,
            open_files=4096,
            output_bytes=64 * MIB,
        )
        result = await self.sandbox.run(command, files=files, limits=limits)
        if result.outcome is Outcome.TIMEOUT and result.wall_s >= limits.wall_s:
            raise CannotJudgeError(LEAN_TIMEOUT, f"after {result.wall_s:.0f} s")
        if result.outcome is not Outcome.EXITED:
            return False, "", f"Lean was stopped: {result.outcome.value.replace('_', ' ')}."
        return result.ok, result.stdout, result.stderr


def extract_proof(text: str) -> str | None:
    """What follows `:=` in the last theorem of the last Lean block, or of the whole text; None where nothing does.

    Only the proof, up to the next command: the statement is the row's, so restating an easier one gains nothing.
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
            after = _COMMAND.search(visible, begun.end())
            return code[begun.end() : after.start() if after else None].strip() or None
        tactics = textwrap.indent(textwrap.dedent(code.strip("\n")), "  ").rstrip()
        return f"by\n{tactics}" if visible.strip() else None
    depth = 0
    for mark in _BODY.finditer(visible, heads[-1].end()):
        if mark.group() != ":=":
            depth += 1 if mark.group() in "([{⟨" else -1
        elif depth <= 0:
            after = _COMMAND.search(visible, mark.end())
            proof = code[mark.end() : after.start() if after else None]
            return proof.strip() if without_comments(proof).strip() not in ("", "by") else None
    return None


def without_comments(code: str) -> str:
    """Lean code with its comments, which nest, turned into spaces; every other character keeps its place."""
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
