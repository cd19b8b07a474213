import asyncio
import json
from typing import Any

import pytest

from nemotron_steps.environments.base import GradeResult, Response, Session
from nemotron_steps.environments.code import code_gen
from nemotron_steps.environments.code.code_gen import breaks_thinking_tags
from nemotron_steps.environments.registry import create


def row(inputs: list[str], outputs: list[str], function: str | None = None) -> dict[str, Any]:
    tests = {"inputs": inputs, "outputs": outputs, "fn_name": function}
    return {"responses_create_params": {"input": "Write."}, "verifier_metadata": {"unit_tests": tests}}


def grade(program: str, task: dict[str, Any], **config: Any) -> GradeResult:
    environment = create("code_gen", config)
    environment.check_row(task, "f:1")

    async def run() -> GradeResult:
        await environment.start()
        return (await environment.verify_group(task, [Response(f"```python\n{program}\n```")], [Session()]))[0]

    return asyncio.run(run())


ADD = row(["1 2\n", "3 4\n"], ["3\n", "7\n"])


class TestInTheSandbox:
    pytestmark = pytest.mark.sandbox

    def test_every_test_must_pass(self) -> None:
        assert grade("print(sum(map(int, input().split())))", ADD).reward == 1.0
        wrong = grade("print(3)", ADD)
        assert wrong.reward == 0.0
        assert wrong.components["tests_passed"] == 0.5
        assert "wrong answer" in wrong.details["problem"]

    @pytest.mark.parametrize("name", ["fd/0", "fd/1", "mem", "environ"])
    def test_a_program_cannot_reach_into_the_harness(self, name: str) -> None:
        program = (
            "import os\n"
            f"try: open(f'/proc/{{os.getppid()}}/{name}', 'rb'); print('reached')\n"
            "except PermissionError: print('refused')"
        )
        assert grade(program, row([""], ["refused\n"])).reward == 1.0

    @pytest.mark.parametrize(
        "program",
        [
            "print('\ud800')",
            "print(3)\x00",
            "import os; os.write(1, bytes(range(256)))",
            "import os, sys; sys.stderr.write('bwrap: no'); os._exit(113)",
            "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
            "import os, signal; os.kill(-1, signal.SIGKILL)",
            "print('[' * 100_000)",
        ],
    )
    def test_nothing_that_a_program_says_or_does_is_more_than_a_wrong_answer(self, program: str) -> None:
        verdict = grade(program, ADD)
        assert verdict.reward == 0.0
        json.dumps(verdict.details, ensure_ascii=False).encode()

    def test_crashes_loops_and_exits_fail(self) -> None:
        assert "ZeroDivisionError" in grade("1/0", ADD).details["problem"]
        wordy = "import sys; sys.stderr.write('x' * 10_000); 1/0"
        assert "ZeroDivisionError" in grade(wordy, ADD).details["problem"]  # the end of what it says
        assert "time-out" in grade("while True: pass", ADD, unit_test_timeout_secs=1.0).details["problem"]
        assert grade("print(3); raise SystemExit(3)", ADD).reward == 0.0

    @pytest.mark.parametrize(("more", "passes"), [(0, True), (1, False)])
    def test_a_program_may_say_as_much_as_it_may_and_no_more(
        self, more: int, passes: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(code_gen, "OUTPUT_PER_TEST", 100_000)
        verdict = grade(f"print('x' * 100_000 + ' ' * {more}, end='')", row([""], ["x" * 100_000]))
        assert verdict.reward == float(passes)
        assert passes or "output limit" in verdict.details["problem"]

    def test_time_is_the_processors_and_of_all_that_a_program_starts(self) -> None:
        spin = "import time\nwhile time.process_time() < 0.6: pass\n"
        assert grade(f"{spin}print(sum(map(int, input().split())))", ADD, unit_test_timeout_secs=5.0).reward == 1.0
        child = f"    import time\n    {spin.splitlines()[1]}\n    os._exit(0)\n"
        shared = f"import os\nfor _ in 'ab':\n  if os.fork() == 0:\n{child}"
        ends = "for _ in 'ab': os.wait()\nprint(sum(map(int, input().split())))"
        assert "time-out" in grade(shared + ends, ADD, unit_test_timeout_secs=1.0).details["problem"]
        assert grade(shared + ends, ADD, unit_test_timeout_secs=5.0).reward == 1.0
        waits = "import time; time.sleep(1.5)\nprint(sum(map(int, input().split())))"
        assert grade(waits, ADD, unit_test_timeout_secs=0.5).reward == 1.0

    def test_a_program_that_the_machine_gave_too_little_time_is_a_failure(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(code_gen, "WALL_FACTOR", 1)
        half = "import time\nwhile time.monotonic():\n  sum(range(9999))\n  time.sleep(0.001)"
        verdict = grade(half, ADD, unit_test_timeout_secs=1.0)
        assert verdict.failure == code_gen.STARVED

    def test_what_a_program_leaves_in_its_group_is_no_burden_of_the_next_test(self) -> None:
        leaves = (
            "import os, sys, time\n"
            "names = [open(f'/proc/{p}/cmdline').read() for p in os.listdir('/proc') if p.isdigit()]\n"
            "print(sum(name.endswith('\\0solution.py\\0') for name in names))\n"
            "sys.stdout.flush()\n"
            "if os.fork() == 0:\n"
            "    os.closerange(0, 3)\n"
            "    time.sleep(60)\n"
            "    os._exit(0)\n"
        )
        assert grade(leaves, row(["", "", ""], ["1\n"] * 3)).reward == 1.0

    def test_function_calls_on_a_class_or_a_plain_function(self) -> None:
        task = row(['[3, 1, 2]\n"up"', '[1]\n"up"'], ["[1, 2, 3]", "[1]"], "arrange")
        solution = (
            "class Solution:\n"
            "    def arrange(self, a: List[int], how: str):\n"
            "        print('noise')\n"
            "        return sorted(a)"
        )
        assert grade(solution, task).reward == 1.0
        assert grade("def arrange(a, how):\n    return sorted(a)", task).reward == 1.0
        assert grade("def arrange(a, how):\n    return a", task).reward == 0.0
        assert grade("def other(a): return a", task).reward == 0.0

    def test_more_tests_than_one_sandbox_takes(self) -> None:
        many = row([f"{n} 1\n" for n in range(40)], [f"{n + 1}\n" for n in range(40)])
        verdict = grade("print(sum(map(int, input().split())))", many)
        assert (verdict.reward, verdict.components["tests_passed"]) == (1.0, 1.0)
        assert (
            grade("a, b = map(int, input().split()); print(a + b if a < 20 else 0)", many).components["tests_passed"]
            == 0.5
        )

    def test_forging_the_harness_gains_nothing(self) -> None:
        forged = (
            "import json, os, signal\n"
            "for fd in ('/proc/%d/fd/1' % os.getppid(),):\n"
            "    try:\n"
            "        out = open(fd, 'w')\n"
            "        for _ in range(2): out.write(json.dumps({'code': 0, 'out': 'pass', 'err': ''}) + chr(10))\n"
            "        out.flush()\n"
            "    except OSError: pass\n"
            "os.kill(os.getppid(), signal.SIGKILL)\n"
        )
        assert grade(forged, ADD).reward == 0.0


def message(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


THOUGHT = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}


@pytest.mark.parametrize(
    ("response", "broken"),
    [
        (Response.from_text("<think>hm</think>x"), False),
        (Response.from_text("x"), False),
        (Response.from_text("<think>hm</think>x</think>"), True),
        (Response.from_text("<think>hm</think>x<think>y"), True),
        (Response.from_text("a<think>hm"), True),
        (Response.from_output([THOUGHT, message("x")]), False),
        (Response.from_output([THOUGHT, message("more</think>x")]), True),
        (Response("x", reasoning="<think> a <think> b"), True),
    ],
)
def test_thinking_tags(response: Response, broken: bool) -> None:
    assert breaks_thinking_tags(response) is broken


def test_broken_thinking_tags_cost_the_penalty_without_running_anything() -> None:
    environment = create("code_gen", {"reasoning_format_penalty": -1.0})
    bad = Response.from_text("<think>a</think>```python\nprint(1)\n``` </think>")
    verdict = asyncio.run(environment.verify(ADD, bad, Session()))
    assert verdict.reward == -1.0
    assert environment.reward_range == (-1.0, 1.0)


@pytest.mark.parametrize(
    ("got", "want", "is_json", "same"),
    [
        ("1.50 2\n", "1.5 2.0", False, True),
        (" a \n b\n\n", "a\nb", False, True),
        ("a b", "a  b", False, False),  # texts are compared as they are
        ("1e2", "100", False, True),
        ("1\n2", "1 2", False, False),
        ("nan", "NaN", False, False),
        ("", "", False, True),
        ("a\n\nb", "a\nb", False, False),
        ("[1, 2.0]", "[1.0, 2]", True, True),
        ('{"b": 1, "a": 2}', '{"a": 2, "b": 1}', True, True),
        ("[1, 2]", "[2, 1]", True, False),
        ("1", '"1"', True, False),
        ("no json", "1", True, False),
        ("[" * 100_000, "1", True, False),
    ],
)
def test_outputs_are_the_same_by_lines_or_by_value(got: str, want: str, is_json: bool, same: bool) -> None:
    assert code_gen._matches(got, want, is_json) is same
