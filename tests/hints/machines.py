"""States of a machine that faults come from: files, models, servers, a full disk, a run at work."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.cli.conftest import Result, until_at_work

Setup = Callable[[Any], object]
"""Called with the bench of a fault."""
PORT, OTHER_PORT = 18761, 18762
STEPS = [sys.executable, "-m", "nemotron_steps.cli.main"]
QUESTION: dict[str, Any] = {
    "responses_create_params": {"input": [{"role": "user", "content": "A or B?"}]},
    "expected_answer": "A",
    "options": [{"A": "one"}, {"B": "two"}],
    "agent_ref": {"name": "mcqa"},
}


def together(*setups: Setup) -> Setup:
    def prepare(bench: Any) -> None:
        for setup in setups:
            setup(bench)

    return prepare


def files(contents: dict[str, str]) -> Setup:
    def write(bench: Any) -> None:
        for name, content in contents.items():
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(content)

    return write


def questions(bad: int = 0, **changed: Any) -> Setup:
    """`rows.jsonl` of a hundred, of which `bad` are changed."""
    rows = [{**QUESTION, **(changed if number < bad else {})} for number in range(100)]
    return files({"rows.jsonl": "".join(json.dumps(row) + "\n" for row in rows)})


def plain_rows(bench: Any) -> None:
    """`rows.jsonl` as TRL has it, which says what to ask and not who grades."""
    files({"rows.jsonl": '{"prompt": "1 + 1?", "answer": "2"}\n'})(bench)


def cut_off(bench: Any) -> None:
    questions()(bench)
    with Path("rows.jsonl").open("a") as file:
        file.write('{"responses_create_par')


def after(*commands: str) -> Setup:
    """Commands that were run before."""

    def run(bench: Any) -> None:
        for command in commands:
            result = bench(*command.split())
            assert result.code == 0, result.err

    return run


def model(
    *, positions: int = 8192, template: bool = True, quantised: bool = False, family: str = "qwen3", **keys: Any
) -> Setup:
    """A tiny Hugging Face folder `./model`; with keys for its config.json, a `./plain` one without them beside it."""

    def write(bench: Any) -> None:
        from tests.models.checkpoints import TEMPLATE, hf_model, write_tokenizer

        folder = Path("model")
        hf_model(family, max_position_embeddings=positions).save_pretrained(folder)
        write_tokenizer(folder)
        if keys:
            shutil.copytree(folder, "plain")
            config = folder / "config.json"
            config.write_text(json.dumps({**json.loads(config.read_text()), **keys}))
        if not template:
            (folder / "chat_template.jinja").unlink()
            Path("family.jinja").write_text(TEMPLATE)
        if quantised:
            whole = json.loads((folder / "config.json").read_text())
            Path("whole").mkdir()
            for file in folder.iterdir():
                (Path("whole") / file.name).write_bytes(file.read_bytes())
            (folder / "config.json").write_text(json.dumps({**whole, "quantization_config": {"quant_method": "fp8"}}))

    return write


def damaged(bench: Any) -> None:
    after("run toy/make")(bench)
    (file,) = Path("home/artifacts").rglob("train.jsonl")
    file.chmod(0o644)
    file.write_text("{}\n")


def without_package(name: str) -> Setup:
    def take_away(bench: Any) -> None:
        def version(asked: str) -> str:
            if asked.startswith(name):
                raise metadata.PackageNotFoundError(asked)
            return metadata.version(asked)

        bench.monkeypatch.setattr("nemotron_steps.runs.prerequisites.version", version)

    return take_away


def without_gpus(bench: Any) -> None:
    if any(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("this host has GPUs")


def port_taken(bench: Any) -> None:
    """Serving goes on until it is stopped, so here it is a process that is ended once it says where it serves."""
    taken = socket.create_server(("127.0.0.1", PORT))
    bench.closing.append(taken.close)

    def serve(*arguments: str) -> Result:
        process = subprocess.Popen([*STEPS, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None
        if not process.stdout.readline():  # it has ended by itself
            _, err = process.communicate(timeout=60)
            return Result(process.returncode, "", err)
        process.terminate()
        process.communicate(timeout=60)
        return Result(0, "", "")

    bench.run = serve


def judge_elsewhere(bench: Any) -> None:
    """Nobody listens at PORT; a server that lists a model at OTHER_PORT."""

    class Models(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b'{"data": [{"id": "judge"}]}'
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", OTHER_PORT), Models)
    Thread(target=server.serve_forever, daemon=True).start()
    bench.closing += [server.shutdown, server.server_close]


def full_disk(bench: Any) -> None:
    """Commands see a file system of 300 kB at ./small, in a mount namespace of their own."""
    Path("small").mkdir()
    mount = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=300k none small && exec "$@"', "sh"]
    if subprocess.run([*mount, "true"], capture_output=True).returncode:
        pytest.skip("this host mounts no file system")

    def run(*arguments: str) -> Result:
        done = subprocess.run([*mount, *STEPS, *arguments], capture_output=True, text=True, timeout=60)
        return Result(done.returncode, done.stdout, done.stderr)

    bench.run = run


def mirrored_by_wandb(bench: Any) -> None:
    """A profile, and W&B as a new process has it: what an earlier test's environment said is forgotten."""
    pytest.importorskip("wandb").teardown()
    Path("env.toml").write_text('[wandb]\nproject = "mine"\n')


def at_work(bench: Any) -> None:
    """A run that takes some seconds, in another process."""
    command = [*STEPS, *["run", "toy/train", "-c", "tiny", "steps=60", "seconds_per_step=0.1"]]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(os.environ))
    bench.closing += [process.kill, process.wait]
    until_at_work(process)
