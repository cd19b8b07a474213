"""Checks of a step that run it, in processes of its own: what it makes, what else it does, and with broken input."""

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import cache
from operator import methodcaller
from pathlib import Path
from typing import Any

from nemotron_steps.errors import StepFailedError
from nemotron_steps.testing.step_manifest import SUITE as MANIFEST
from nemotron_steps.testing.step_subject import CANARY, PICTURE, Ran, StepSubject, cut, files_of, tree_of
from nemotron_steps.testing.suite import NotApplicable, Suite, Unmet, told

SUITE: Suite[StepSubject] = Suite(MANIFEST)
_COMPOSES = "every_config_composes"


@SUITE.check(_COMPOSES)
def dry_run_needs_no_data(step: StepSubject) -> None:
    """`steps run STEP -c CONFIG -d` shows config and plan of every config before any input is there."""
    names = step.manifest.config_names or ("default",)
    home = step.folder / "dry"
    ran = step.process("dry", [[*step.words(home, inputs={}, config=name), "--dry-run"] for name in names], home=home)
    for index, name in enumerate(names):
        error = ran.error(index)
        if error is not None:
            raise told(error, f"`steps run {step.manifest.id} -c {name} -d` fails without data: ")


@SUITE.check(_COMPOSES, "entry_takes_a_context")
def runs(step: StepSubject) -> None:
    """The step runs with its tiny config and small inputs."""
    if step.manifest.step.entry is None:
        raise NotApplicable("the step has no entry")
    error = step.first.error()
    left_out = error is not None and error.get("code") == StepFailedError.code and " left " in error["what"]
    if error is not None and not left_out:
        raise told(next(iter(error.get("problems", ())), error))  # of a plan's problems: which, and not how many


@SUITE.check("runs")
def outputs_validate(step: StepSubject) -> None:
    """Every promised output is there and is what its type says."""
    error = step.first.error()
    if error is not None:
        raise told(error)
    made = step.digests(step.first)
    missing = [port.name for port in step.manifest.produces if port.required and port.name not in made]
    if missing:
        raise Unmet(f"the step leaves {', '.join(missing)} out")


@SUITE.check("outputs_validate")
def says_what_it_did(step: StepSubject) -> None:
    """The step reports a summary, which `steps run` prints and the report shows."""
    if not _own_result(step, step.first)["summary"]:
        raise Unmet("the step reports no summary", hint='context.tracker.summary({"rows": count})')


@SUITE.check("outputs_validate")
def a_second_run_is_cached(step: StepSubject) -> None:
    """The same command again does nothing and says so."""
    again = step.first.error(1)
    if again is not None:
        raise told(again, "the same command again fails: ")
    state = _own_result(step, step.first, 1)["state"]
    if state != "cached":
        hint = "what the config takes from clocks, folders or random numbers belongs into the step's function"
        raise Unmet(f"the same command again is not cached: it {state}", hint=hint)


@SUITE.check("a_second_run_is_cached")
def same_seed_same_outputs(step: StepSubject) -> None:
    """Another process, home, hash seed and working directory make the same bytes."""
    error = step.second.error()
    if error is not None:
        raise told(error, "the step fails in another home: ")
    first, second = step.digests(step.first), step.digests(step.second)
    differing = sorted(port for port in first if first[port] != second.get(port))
    if differing:
        hint = "seed every generator from the config; sort sets and listings; write no times and no paths"
        raise Unmet(f"two runs differ in {', '.join(differing)}", hint=hint)


@SUITE.check("same_seed_same_outputs")
def resumes_after_a_kill(step: StepSubject) -> None:
    """Killed at its last file, and again when it has returned, it goes on and makes the same."""
    home = step.folder / "killed"
    words = step.words(home)
    if step.first.seen["writes_inside"]:
        _expect_signal(step.process("killed", [words], home=home, at_write=step.first.seen["writes_inside"]))
    _expect_signal(step.process("killed", [words], home=home, at_return=True))
    last = step.process("resumed", [words], home=home)
    error = last.error()
    if error is not None:
        hint = "context.work keeps what a killed attempt left: use it or clear it"
        raise told(error, "after a kill the step fails: ", hint=hint)
    if step.digests(last) != step.digests(step.first):
        raise Unmet("after a kill the step makes something else", hint="append to nothing in context.work")


@SUITE.check("outputs_validate")
def stops_when_asked(step: StepSubject) -> None:
    """On SIGTERM the step ends at once, as interrupted, and nothing is committed."""
    count = step.first.seen["writes_inside"]
    if not count:
        raise NotApplicable("the step opens no file that Python knows of")
    home = step.folder / "stopped"
    ran = step.process("stopped", [step.words(home)], home=home, at_write=count, signal=int(signal.SIGTERM))
    if not ran.commands or ran.commands[0]["code"] != 130:
        code = ran.commands[0]["code"] if ran.commands else ran.code
        hint = "`except Exception`, never `except:` or `except BaseException`"
        raise Unmet("the step goes on after SIGTERM", found=f"exit code {code}, of 130", hint=hint)


@SUITE.check("outputs_validate")
def writes_only_where_it_may(step: StepSubject) -> None:
    """It writes below its run's home, TMPDIR and XDG_CACHE_HOME only: not beside its inputs, nor into HOME."""
    mine = {str(path) for path in step.fed.values()}
    written = [path for path in step.first.seen["written"] if not any(path.startswith(each) for each in mine)]
    for folder, name in (("cwd", "the working directory"), ("user", "HOME")):
        written += [f"{path} in {name}" for path in step.leftovers("first", folder)]
    if written:
        found, hint = ", ".join(dict.fromkeys(written)), "context.outputs[PORT].path, context.work, or tempfile"
        raise Unmet("the step writes outside of its folders", found=found, hint=hint)


@SUITE.check("outputs_validate")
def removes_its_temporary_files(step: StepSubject) -> None:
    """Nothing is left in TMPDIR."""
    left = step.leftovers("first", "tmp")
    if left:
        raise Unmet("the step leaves temporary files", found=", ".join(left[:5]), hint="with TemporaryDirectory() as …")


@SUITE.check("outputs_validate")
def inputs_stay_as_they_are(step: StepSubject) -> None:
    """It writes to none of its inputs."""
    if not step.fed:
        raise NotApplicable("the step is fed no input")
    written = [path for path in step.first.seen["written"] if any(path.startswith(str(f)) for f in step.fed.values())]
    if written:
        raise Unmet("the step writes to its inputs", found=", ".join(written))
    for port, path in step.fed.items():
        if tree_of(path) != step.fed_before[port]:
            raise Unmet(f"the input '{port}' is otherwise than before the run", where=str(path))


@SUITE.check("outputs_validate")
def leaves_nothing_running(step: StepSubject) -> None:
    """When it returns, the threads and programs that it started are over."""
    seen = step.first.seen
    if seen["children"] or seen["threads"]:
        raise Unmet("the step leaves something running", found=", ".join([*seen["children"], *seen["threads"]]))


@SUITE.check("outputs_validate")
def asks_no_other_machine(step: StepSubject) -> None:
    """The tiny config needs no network."""
    if step.first.seen["hosts"]:
        raise Unmet("the step asks other machines", found=", ".join(step.first.seen["hosts"][:5]))


@SUITE.check("outputs_validate")
def keeps_secrets_out(step: StepSubject) -> None:
    """The value of a secret variable is in no artifact and no file of the run."""
    for path in sorted(step.first.home.rglob("*")):
        if path.is_file() and CANARY.encode() in path.read_bytes():
            raise Unmet("the value of the variable KIT_API_KEY is written down", where=str(path))


@SUITE.check("a_second_run_is_cached")
def key_knows_the_code(step: StepSubject) -> None:
    """Every module and file of its own package that the step used is part of the cache key."""
    from nemotron_steps.runs.code_digest import Code

    code = Code()
    for reference in (step.entry_module, step.manifest.step.config_schema or ""):
        code.add_module(reference.partition(":")[0])
    known = {path.resolve() for paths in code.files.values() for path in paths}
    used = {Path(file).resolve() for file in step.first.seen["used"]}
    packs = tuple(pack.base.parent.resolve() for pack in step.registry.packs if pack.name == step.manifest.pack)
    unknown = sorted(str(f) for f in used - known if not any(f.is_relative_to(pack) for pack in packs))
    if unknown:
        hint = "import modules by name (a string 'package.module' counts), or raise the manifest's version"
        raise Unmet("a change of these files would not make the step run again", found=", ".join(unknown), hint=hint)


def _expect_signal(ran: Ran) -> None:
    if ran.code != -signal.SIGKILL:
        raise Unmet("the step did not reach the point where it is killed", found=f"exit code {ran.code}")


def _own_result(step: StepSubject, ran: Ran, index: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = next(s for s in ran.result(index)["steps"] if s["step"] == step.manifest.id)
    return found


_MUST_FAIL = ("a_missing_input_is_told", "a_wrong_type_is_told")


def _telling(check: str) -> Callable[[StepSubject], None]:
    def tells(step: StepSubject) -> None:
        """Broken input is an error with a code; what the step can cope with may be none."""
        if not step.fed:
            raise NotApplicable("the kit feeds the step no input: its config has `inputs:`, or it reads none")
        own = [(given, error) for name, given, error in _told(step) if name == check]
        if not own:
            raise NotApplicable("the step is fed no rows")
        for given, error in own:
            if error is None and check in _MUST_FAIL:
                hint = "a validator of the type, or a check of the step's, raises DataError or ArtifactError"
                raise Unmet(f"{given} says nothing", hint=hint)
            # What the runner or the command line makes of an exception of no class of this project.
            code = "" if error is None else error.get("code")
            if error is not None and (code is None or (code == StepFailedError.code and "' failed: " in error["what"])):
                hint = "raise DataError(what, where=f'{file}:{line}', expected=…, found=…)"
                what = f"{given} raises an exception without a code"
                raise Unmet(what, where=error.get("where"), found=error["what"], hint=hint)

    tells.__name__ = check
    return tells


for _check in (*_MUST_FAIL, "a_truncated_file_is_told", "a_broken_row_is_told"):
    SUITE.check("outputs_validate")(_telling(_check))


@cache
def _told(step: StepSubject) -> list[tuple[str, str, dict[str, Any] | None]]:
    """Check, what was given and the error of every broken input; in one process, which says after each what came."""
    folder = step.folder / "bad"
    cases = list(_broken(step, folder))
    commands = [
        step.words(folder / f"home-{index}", inputs={**step.fed, port: path})
        for index, (_, port, path, _) in enumerate(cases)
    ]
    ran = step.process("bad", commands, home=folder)
    return [
        (check, f"given {kind} as '{port}', the step", ran.error(index))
        for index, (check, port, _, kind) in enumerate(cases)
    ]


def _broken(step: StepSubject, bad: Path) -> Iterator[tuple[str, str, Path, str]]:
    for port, path in step.fed.items():
        folder = bad / port
        missing = folder / "missing"
        missing.mkdir(parents=True)
        (missing / "kit.unknown").write_text("another file\n")
        yield "a_missing_input_is_told", port, missing, "a folder without its files"
        pictures = _changed(path, folder / "pictures", lambda data: PICTURE)
        yield "a_wrong_type_is_told", port, pictures, "files that are pictures"
        yield "a_truncated_file_is_told", port, _changed(path, folder / "cut", cut), "a truncated file"
        rows = [file for file in files_of(path) if file.suffix == ".jsonl"]
        row = json.loads(rows[0].read_text("utf-8").splitlines()[0]) if rows else {}
        for kind, broken in (("without fields", {}), ("with null in every field", dict.fromkeys(row))) if rows else ():
            second = b"\n" + json.dumps(broken).encode() + b"\n"
            changed = _changed(path, folder / kind.replace(" ", "-"), methodcaller("replace", b"\n", second, 1))
            yield "a_broken_row_is_told", port, changed, f"a row {kind}"


def _changed(path: Path, folder: Path, change: Callable[[bytes], bytes]) -> Path:
    if path.is_dir():
        shutil.copytree(path, folder)
    else:
        folder.mkdir()
        shutil.copy(path, folder / path.name)
    for file in files_of(folder):
        file.write_bytes(change(file.read_bytes()))
    return folder if path.is_dir() else folder / path.name
