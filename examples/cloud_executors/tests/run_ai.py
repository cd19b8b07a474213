"""Run:ai's API as documented, as far as the executor asks. A workload of one node is a process of this machine."""

from __future__ import annotations

import http.server
import json
import os
import shlex
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SECRET = "qwertyuiop0123456789"
KEYS = (
    {"grantType": "client_credentials", "clientId": "me", "clientSecret": SECRET},
    {"grantType": "app_token", "appId": "app", "appSecret": SECRET},
)


class Workload:
    """One that was made, and its only pod where it has one."""

    def __init__(self, kind: str, spec: dict[str, Any]) -> None:
        self.stopped = False
        self.pod: subprocess.Popen[bytes] | None = None
        if kind == "trainings":
            variables = {each["name"]: each["value"] for each in spec["environmentVariables"] if "value" in each}
            self.pod = subprocess.Popen(
                shlex.split(spec["command"]),
                cwd="/",
                env={"PATH": os.environ["PATH"], "HOSTNAME": "pod", **variables},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )

    @property
    def phase(self) -> str:
        code = self.pod.poll() if self.pod else None
        if code is None and (self.pod or not self.stopped):
            return "Stopping" if self.stopped else "Running"
        return "Stopped" if self.stopped else ("Failed" if code else "Completed")

    def stop(self) -> None:
        self.stopped = True
        if self.pod:
            self.pod.terminate()


class RunAi(http.server.ThreadingHTTPServer):
    """`asked` has every request but those for tokens; `answers` what is said to a path, or to all of them under ""."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[tuple[str, str, Any]] = []
        self.answers: dict[str, tuple[int, Any]] = {}
        self.workloads: dict[str, Workload] = {}
        self.tokens = 0
        self.projects = [{"name": "alignment", "id": "7", "clusterId": "c1"}]
        self.lock = threading.Lock()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def told(self, method: str, path: str, body: Any, token: str | None) -> tuple[int, Any]:
        *_, name, last = path.split("/")
        for at in ("", path):
            if at in self.answers:
                return self.answers[at]
        if path == "/token":
            if body not in KEYS:
                return 403, {"code": 403, "message": "Account is not fully set up"}
            self.tokens += 1
            return 200, {"accessToken": f"token-{self.tokens}"}
        if token != f"Bearer token-{self.tokens}":
            return 401, {"code": 401, "message": "Unauthorized"}
        self.asked.append((method, path, body))
        if path == "/org-unit/projects":
            return 200, {"projects": self.projects}
        if path in ("/workloads/trainings", "/workloads/distributed"):
            made = f"w-{len(self.workloads) + 1}"
            self.workloads[made] = Workload(last, body["spec"])
            return 202, {"workloadId": made, "name": body["name"], "actualPhase": "Creating"}
        if method == "GET" and path == f"/workloads/{last}" and last in self.workloads:
            return 200, {"id": last, "phase": self.workloads[last].phase}
        if last == "suspend" and name in self.workloads:
            self.workloads[name].stop()
            return 202, b""
        return 404, {"code": 404, "message": "Not Found"}


class _Handler(http.server.BaseHTTPRequestHandler):
    server: RunAi

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "null"))

    def _answer(self, body: Any) -> None:
        path = self.path.partition("?")[0].removeprefix("/api/v1")
        with self.server.lock:
            status, answer = self.server.told(self.command, path, body, self.headers["Authorization"])
        text = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        if 300 <= status < 400:
            self.send_header("Location", f"{self.server.address}/elsewhere")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@contextmanager
def serving() -> Iterator[RunAi]:
    """The server while it lasts."""
    server = RunAi()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        for pod in (workload.pod for workload in server.workloads.values() if workload.pod):
            pod.kill()
            pod.wait()
