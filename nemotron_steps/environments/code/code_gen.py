"""code_gen: the program in the answer's last code block must pass every test, in the sandbox.

A test feeds standard input and compares standard output, or calls a function with JSON arguments and compares its
JSON result. Expected outputs stay outside the sandbox, so a program that tampers with the harness beside it learns
nothing it could answer with.
"""

import asyncio
import base64
import json
import zlib
from decimal import Decimal, InvalidOperation
from typing import ClassVar, NamedTuple

from pydantic import Field

from nemotron_steps.environments.base import GradeResult, Response, Row, Session
from nemotron_steps.environments.code.sandboxed import SandboxedConfig, SandboxedEnvironment
from nemotron_steps.environments.failures import CannotJudgeError, RowError
from nemotron_steps.environments.grading_pool import WALL_FACTOR
from nemotron_steps.environments.responses import THINK_CLOSE, THINK_OPEN, content_text
from nemotron_steps.environments.text.extraction import fenced_blocks
from nemotron_steps.sandbox import Limits, Outcome, SandboxResult
from nemotron_steps.sandbox.base import MIB

PYTHON_TAGS = frozenset({"", "python", "python3", "py"})
STARVED = "tests_starved"
"""Failure class: a test took WALL_FACTOR times its time by the clock, without using it up and without just sleeping."""
CHUNK = 16
"""Tests run in one sandbox; a failure ends the grading with its chunk."""
OUTPUT_PER_TEST = 4 * MIB

PRELUDE = """\
import sys
sys.setrecursionlimit(50000)
from typing import *
import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
"""
"""Before function-call programs, which are written without imports on the sites they come from."""

HARNESS = r"""
import ctypes, json, os, resource, selectors, signal, subprocess, sys, time
prctl = ctypes.CDLL(None).prctl
prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: the programs, of the same user, may not open this one's files
prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: what they leave behind is this process's to reap
job = json.loads(sys.stdin.read())


def end(child):  # with what it has left in its group, until they are gone
    for _ in range(1000):
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            break
        child.wait()
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        time.sleep(0.002)
    child.wait()


def spent():  # by programs that have ended, and what they started
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(test):
    before = spent()
    child = subprocess.Popen([sys.executable, "-B", job["script"]], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, bufsize=0, start_new_session=True)
    limit = int(job["timeout"]) + 1
    resource.prlimit(child.pid, resource.RLIMIT_CPU, (limit, limit + 1))
    begin, left, stopped = time.monotonic(), memoryview(test), None
    until = min(begin + job["wall"], last)
    out, err = bytearray(), bytearray()
    with selectors.DefaultSelector() as selector, child.stdin, child.stdout, child.stderr:
        selector.register(child.stdin, selectors.EVENT_WRITE)
        for stream, kept in ((child.stdout, out), (child.stderr, err)):
            selector.register(stream, selectors.EVENT_READ, kept)
        for key in selector.get_map().values():
            os.set_blocking(key.fd, False)
        while selector.get_map() and not stopped:
            wait = until - time.monotonic()
            for key, _ in selector.select(max(0, wait)):
                try:
                    if key.data is None:
                        left = left[os.write(key.fd, left[:65536]):]
                        more = len(left) > 0
                    else:
                        more = os.read(key.fd, 65536)
                        key.data.extend(more)
                except BlockingIOError:  # it uses the other end itself
                    continue
                except BrokenPipeError:
                    more = False
                if not more:
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
            del err[:-500]
            if len(out) > job["output"]:
                stopped = "output limit"
            elif wait <= 0 and selector.get_map():
                stopped = "time-out, asleep"
    try:
        if not stopped:  # it may have closed its outputs
            child.wait(max(0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        stopped = "time-out, asleep"
    end(child)
    used = spent() - before
    if used > job["timeout"]:
        stopped = "time-out"
    elif stopped == "time-out, asleep" and used > (until - begin) / 50:
        stopped = "starved"
    if stopped:
        return {"code": None, "out": "", "err": stopped}
    return {"code": child.returncode, "out": out.decode(errors="replace"), "err": err.decode(errors="replace")}


last = time.monotonic() + job["timeout"] * len(job["tests"]) + job["wall"]
for test in job["tests"]:
    result = run(test.encode(errors="surrogatepass"))
    print(json.dumps(result), flush=True)
    if result["code"] != 0:
        break
"""

CALL = r"""
import json, sys
_arguments = [json.loads(line) for line in sys.stdin.read().split("\n") if line.strip()]
_channel = sys.stdout
sys.stdout = sys.stderr
exec(compile(open("solution.py").read(), "solution.py", "exec"), globals())
_target = globals().get("Solution")
_function = getattr(_target(), FUNCTION) if _target is not None and hasattr(_target, FUNCTION) else globals()[FUNCTION]
_channel.write(json.dumps(_function(*_arguments)))
"""


class Tests(NamedTuple):
    """Inputs and expected outputs, and the function to call or None for standard input and output."""

    inputs: list[str]
    outputs: list[str]
    function: str | None


class CodeGenConfig(SandboxedConfig):
    """Settings."""

    unit_test_timeout_secs: float = Field(10.0, gt=0.0)
    """Processor time of one test, of all its processes together."""
    memory_mib: int = Field(2048, gt=0)
    """Of one program."""
    reasoning_format_penalty: float = Field(0.0, le=0.0)
    """Reward of an answer that breaks the thinking tags, whatever its tests say."""
    num_processes: int | None = Field(None, ge=1)
    """Sandboxes at once; null for one a core."""


class CodeGen(SandboxedEnvironment):
    """See the module docstring.

    A row has `verifier_metadata.unit_tests`: lists `inputs` and `outputs`, and `fn_name` where a function is called.
    """

    name: ClassVar[str] = "code_gen"
    required_fields: ClassVar[tuple[str, ...]] = ("verifier_metadata.unit_tests",)
    config_class = CodeGenConfig
    config: CodeGenConfig

    def _setup(self) -> None:
        self.reward_range = (self.config.reasoning_format_penalty, 1.0)
        self._make_sandbox(max_concurrency=self.config.num_processes)

    def check_values(self, row: Row) -> None:
        where = "verifier_metadata.unit_tests"
        try:
            tests = unit_tests_of(row)
        except (ValueError, KeyError, TypeError, zlib.error) as error:
            raise RowError(where, "inputs and outputs, or packed ones", repr(error)[:120]) from error
        if not all(isinstance(each, str) for each in (*tests.inputs, *tests.outputs, tests.function or "")):
            raise RowError(where, "texts as inputs, outputs and fn_name", repr(tests)[:80])
        if not tests.inputs or len(tests.inputs) != len(tests.outputs):
            raise RowError(where, "as many inputs as outputs", f"{len(tests.inputs)} and {len(tests.outputs)}")
        if tests.function is None:
            return
        texts = [("inputs", i, line) for i, each in enumerate(tests.inputs) for line in each.split("\n")]
        texts = [(name, i, line) for name, i, line in texts if line.strip()]
        for name, index, text in (*texts, *(("outputs", i, each) for i, each in enumerate(tests.outputs))):
            try:
                json.loads(text)
            except (ValueError, RecursionError) as error:
                raise RowError(f"{where}.{name}[{index}]", "JSON", text[:80]) from error

    async def verify(self, row: Row, response: Response, session: Session) -> GradeResult:
        tests = unit_tests_of(row)
        if breaks_thinking_tags(response):
            return GradeResult(self.config.reasoning_format_penalty, {"reasoning_format_violation": 1.0})
        program = extract_program(response.text)
        components = {"reasoning_format_violation": 0.0, "code_found": float(program is not None)}
        if program is None:
            return GradeResult(0.0, components)
        passed, problem = 0, None
        for begin in range(0, len(tests.inputs), CHUNK):
            part = Tests(tests.inputs[begin : begin + CHUNK], tests.outputs[begin : begin + CHUNK], tests.function)
            right, problem = await self._run(program, part)
            passed += right
            if problem is not None:
                break
        components["tests_passed"] = passed / len(tests.inputs)
        return GradeResult(float(problem is None), components, details={"problem": problem})

    async def _run(self, program: str, tests: Tests) -> tuple[int, str | None]:
        config = self.config
        script, files = "solution.py", {"solution.py": program}
        if tests.function is not None:
            script = "call.py"
            files[script] = f"{PRELUDE}FUNCTION = {tests.function!r}\n{CALL}"
        job = {
            "tests": tests.inputs,
            "script": script,
            "timeout": config.unit_test_timeout_secs,
            "wall": config.unit_test_timeout_secs * WALL_FACTOR,
            "output": OUTPUT_PER_TEST,
        }
        seconds = config.unit_test_timeout_secs * (len(tests.inputs) + WALL_FACTOR) + 10.0
        limits = Limits(
            wall_s=seconds,
            cpu_s=int(seconds) + 1,
            memory_bytes=config.memory_mib * MIB,
            output_bytes=OUTPUT_PER_TEST * 2 * len(tests.inputs),
        )
        result = await self.sandbox.run(code=HARNESS, stdin=json.dumps(job), files=files, limits=limits)
        # Outputs may have megabytes, so they are compared off the event loop.
        return await asyncio.to_thread(_first_problem, result, tests)


def _first_problem(result: SandboxResult, tests: Tests) -> tuple[int, str | None]:
    """(tests passed, what went wrong first)."""
    lines = iter(result.stdout.splitlines())
    for index, expected in enumerate(tests.outputs):
        try:
            ended = json.loads(next(lines, ""))
            code, out, err = ended["code"], str(ended["out"]), str(ended["err"])
        except (ValueError, RecursionError, TypeError, KeyError):
            reason = "stopped" if result.outcome is Outcome.EXITED else result.outcome.value
            return index, f"test {index}: {reason} {result.stderr[-200:]}"
        if code is None and err == "starved":
            raise CannotJudgeError(STARVED, f"test {index}")
        if code != 0:
            return index, f"test {index}: {err[-200:]}"
        if not _matches(out, expected, tests.function is not None):
            return index, f"test {index}: wrong answer {out[:100]!r}, expected {expected[:100]!r}"
    return len(tests.outputs), None


def unit_tests_of(row: Row) -> Tests:
    """A row's tests, plain or packed (zlib, base64)."""
    raw = row["verifier_metadata"]["unit_tests"]
    if "packed" in raw:
        unpacked = zlib.decompressobj()
        text = unpacked.decompress(base64.b64decode(raw["packed"]), 1024 * MIB)
        raw = {**json.loads(text), "fn_name": raw.get("fn_name")}
    return Tests(list(raw["inputs"]), list(raw["outputs"]), raw.get("fn_name") or None)


def extract_program(text: str) -> str | None:
    """The last Python (or untagged) fenced block, None when there is none."""
    blocks = [content for info, content in fenced_blocks(text) if info.lower() in PYTHON_TAGS]
    return blocks[-1] if blocks else None


def breaks_thinking_tags(response: Response) -> bool:
    """Thinking tags in the answer, or more than one pair in the reasoning; a tag beside a reasoning item is stray."""
    tags = (THINK_OPEN, THINK_CLOSE)
    answers = [response.text]
    if any(item.get("type") == "reasoning" for item in response.output):
        answers += [content_text(item.get("content")) for item in response.output if item.get("type") == "message"]
    stray = any(tag in answer for answer in answers for tag in tags)
    return stray or any(response.reasoning.count(tag) > 1 for tag in tags)


def _matches(output: str, expected: str, is_json: bool) -> bool:
    if is_json:
        try:
            return bool(json.loads(output) == json.loads(expected))
        except (ValueError, RecursionError):
            return False
    got, want = ([line.strip() for line in text.strip().split("\n")] for text in (output, expected))
    if len(got) != len(want):
        return False
    try:
        for mine, right in zip(got, want, strict=True):
            if mine != right and [*map(Decimal, mine.split())] != [*map(Decimal, right.split())]:
                return False
    except InvalidOperation:
        return False
    return True
