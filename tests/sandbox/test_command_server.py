"""The program inside a session, spoken to over pipes as a session does, without a sandbox around it."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.sandbox.command_server import COMMAND_SERVER

Ask = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[bytes]]:
    words = [sys.executable, "-I", "-S", "-c", COMMAND_SERVER, "0", "1", "together"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(20) == 0


@pytest.fixture
def ask(server: subprocess.Popen[bytes]) -> Ask:
    def ask(*argv: str, **job: Any) -> dict[str, Any]:
        if argv:
            job = {"argv": argv, "cwd": "/", "stdin": "", "wall_s": 30.0, "output_bytes": 10, **job}
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps(job).encode() + b"\n")
        server.stdin.flush()
        answer: dict[str, Any] = json.loads(server.stdout.readline())
        return answer

    return ask


def ended(answer: dict[str, Any]) -> tuple[Any, ...]:
    return answer["outcome"], answer["code"], answer["out"], answer["err"]


@pytest.mark.parametrize("argv", [("/bin/no-such-program",), ("nothing\x00like it",)])
def test_a_command_that_cannot_begin_is_a_result(ask: Ask, argv: tuple[str, ...]) -> None:
    outcome, code, out, err = ended(ask(*argv))
    assert (outcome, code, out) == ("exited", 127, "") and err
    assert ended(ask("true", cwd="/no/such/folder"))[:2] == ("exited", 127)


def test_an_interrupt_of_a_command_ends_no_session_and_commands_can_be_interrupted(ask: Ask) -> None:
    assert ended(ask("sh", "-c", "kill -INT $PPID; echo on"))[:3] == ("exited", 0, "on\n")
    assert ended(ask("sh", "-c", "kill -INT $$; echo on"))[:3] == ("exited", 130, "")


@pytest.mark.parametrize(
    ("written", "outcome", "kept"),
    [(9, "exited", 9), (10, "exited", 10), (11, "output_limit", 10), (100_000, "output_limit", 10)],
)
def test_a_command_may_write_as_much_as_it_may_and_no_more(ask: Ask, written: int, outcome: str, kept: int) -> None:
    # The second is read while it runs, the first perhaps after it has ended.
    for last in ("", "; sleep 0.2"):
        answer = ask("sh", "-c", f"head -c {written} /dev/zero | tr '\\0' x{last}")
        assert (answer["outcome"], answer["out"]) == (outcome, "x" * kept)


def test_files_are_written_with_their_folders_and_what_cannot_be_is_told(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    files = {f"{tmp_path}/there/a": "é", f"{tmp_path}/new/deep/b": "\ud800"}
    assert ended(ask(files=files)) == ("exited", 0, "", "")
    assert (tmp_path / "there/a").read_text() == "é" and (tmp_path / "new/deep/b").read_bytes() == b"\xed\xa0\x80"
    outcome, code, _, err = ended(ask(files={f"{tmp_path}/there/a/b": "x"}))
    assert (outcome, code) == ("exited", 1) and "File exists" in err


@pytest.mark.parametrize(
    ("holds", "outcome"),
    [
        ("sleep 30", "exited"),
        ("yes", "output_limit"),
    ],
)
def test_what_has_left_the_group_holds_no_answer_up_beyond_the_time_of_its_command(
    ask: Ask, tmp_path: Path, holds: str, outcome: str
) -> None:
    left = f"setsid sh -c ': > left; {holds}' & while [ ! -e left ]; do :; done; exit 3"
    answer = ask("sh", "-c", left, wall_s=3.0, output_bytes=1000, cwd=str(tmp_path))
    assert answer["outcome"] == outcome and 3 <= answer["wall_s"] < 20


@pytest.mark.parametrize("without", ["sys.modules['ctypes'] = None", "import ctypes; ctypes.CDLL = lambda _: object()"])
def test_a_server_that_its_commands_could_write_for_does_not_begin(without: str) -> None:
    words = [sys.executable, "-c", f"import sys; {without}\n{COMMAND_SERVER}", "0", "1", "together"]
    ended = subprocess.run(words, input=b"", capture_output=True)
    assert ended.returncode == 1 and b"cannot keep its files from its commands" in ended.stderr


def test_commands_leave_no_descriptor_and_no_process(ask: Ask, server: subprocess.Popen[bytes]) -> None:
    def held() -> tuple[int, str]:
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text()
        return len(list(Path(f"/proc/{server.pid}/fd").iterdir())), children

    ask("true")
    before = held()
    for argv in (("true",), ("/bin/no-such-program",), ("sh", "-c", "sleep 30 & exit 3"), ("yes",)) * 25:
        ask(*argv, stdin="x" * 100_000)
    assert held() == before
