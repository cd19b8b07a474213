"""Serve an environment over HTTP as NeMo-Gym's servers are: loopback unless told otherwise, clients bounded in number,
in time and in kind (http_server.py).

    resources server    POST /seed_session, /{tool}, /verify, /aggregate_metrics; /verify_group for a whole group
    agent               POST /run: a rollout against a model server, graded
    head server         GET /global_config_dict_yaml, /server_instances: where the two above are, which is here

A session is a cookie, sent again with every answer, because NeMo-Gym's agents keep those of the last one only. A tool
of a session that is named `run` or `aggregate_metrics` goes before the endpoint. A rollout that could not be judged
answers `"reward": null` with its failure class and `mask_sample`, so that no client takes it for a zero.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from types import TracebackType
from typing import Any
from urllib.parse import unquote, urlsplit

from nemotron_steps.environments.base import Environment, GradeResult, Session
from nemotron_steps.environments.http_client import HttpStatusError, JsonClient, ServerUnreachableError
from nemotron_steps.environments.http_server import HttpServer, Reply, Request
from nemotron_steps.environments.loop_thread import LoopThread
from nemotron_steps.environments.recorded import TASK_INDEX, prompt_key
from nemotron_steps.environments.remote.head_server import AGENTS, GLOBAL_CONFIG, RESOURCES
from nemotron_steps.environments.responses import Response, function_call_output_item, text_of
from nemotron_steps.errors import DataError, StepsError, WorkerLostError

COOKIE = "session"
MAX_STEPS = 64
"""Assistant turns of a rollout of /run, where the environment's settings do not say."""
_OF_SESSIONS = frozenset({"seed_session", "verify", "verify_group"})
_OF_THE_SERVER = frozenset({"run", "aggregate_metrics"})
_ALIVE = frozenset({"/", "/health", "/healthz", "/livez", "/readyz"})
POLICY_MODEL = "policy_model"
"""What NeMo-Gym's configs call the server of the model in training."""


@dataclass
class _Held:
    session: Session
    used: float


@dataclass(eq=False)
class _Waiting:
    """A rollout whose group is not whole."""

    response: Response
    session: Session
    verdict: asyncio.Future[GradeResult]


class EnvironmentServer:
    """An environment on a port, from `with` to its end; it runs on an event loop in a thread of its own.

    Args:
        host, port: where to listen; port 0 picks a free one, see `url`.
        agent: what the head server calls the agent; default: `NAME_simple_agent`.
        model_url: of the model server that /run samples from, up to `/v1`; a request may name another one.
        group_size: of an environment that judges groups, a /verify waits until so many of one prompt have come.
        session_ttl_s: sessions unused for longer are released.
    """

    def __init__(
        self,
        environment: Environment,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        agent: str | None = None,
        model_url: str | None = None,
        group_size: int | None = None,
        session_ttl_s: float = 3600.0,
    ) -> None:
        self.environment = environment
        self._agent = agent or f"{environment.name}_simple_agent"
        self._model_url = model_url
        self._group_size = group_size
        self._groups: dict[str, list[_Waiting]] = {}
        self._judging: set[asyncio.Task[None]] = set()
        self._ttl = session_ttl_s
        self._sessions: dict[str, _Held] = {}
        self._started = time.time()
        self._http = HttpServer(self._answer, host=host, port=port)

    @property
    def url(self) -> str:
        """Base URL to reach it at."""
        return self._http.url

    def __enter__(self) -> EnvironmentServer:
        self._thread = LoopThread("environment")
        self._thread.run(self._start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.run(self._close())
        self._thread.stop()

    async def _start(self) -> None:
        await self.environment.start()
        await self._http.start()

    async def _close(self) -> None:
        await self._http.stop()
        for judging in self._judging:
            judging.cancel()
        for held in self._sessions.values():
            await self.environment.release(held.session)
        await self.environment.close()

    async def _answer(self, request: Request) -> Reply:
        if request.method == "GET":
            return self._get(request)
        if request.method != "POST":
            return Reply(405, {"error": f"{request.method} is not allowed"}, (("Allow", "GET, POST"),))
        try:
            body = json.loads(request.body or b"{}")
            if not isinstance(body, dict):
                raise ValueError("not an object")
        except (ValueError, RecursionError) as error:
            return Reply(400, {"error": f"the body must be a JSON object: {error}"})
        try:
            cookie = SimpleCookie(request.headers.get("cookie") or "").get(COOKIE)
        except CookieError:
            cookie = None
        try:
            return await self._post(unquote(request.path.strip("/")), body, cookie.value if cookie else None)
        except DataError as error:
            return Reply(422, {"error": error.to_dict()})
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            return Reply(422, {"error": f"malformed request: {error!r}"})
        except StepsError as error:
            return Reply(503, {"error": error.to_dict()})

    def _get(self, request: Request) -> Reply:
        if request.path in _ALIVE:
            return Reply(200, {"environment": self.environment.name, "status": "ok"})
        if request.path == GLOBAL_CONFIG:
            import yaml

            # A JSON string that holds YAML: what NeMo-Gym's client decodes.
            return Reply(200, yaml.safe_dump(self._global_config(request), sort_keys=False))
        if request.path == "/server_instances":
            return Reply(200, self._instances(request))
        return Reply(404, {"error": f"no {request.path} here"})

    async def _post(self, path: str, body: dict[str, Any], cookie: str | None) -> Reply:
        limit = time.monotonic() - self._ttl
        old = [key for key, held in self._sessions.items() if held.used < limit]
        for expired in [self._sessions.pop(key) for key in old]:
            await self.environment.release(expired.session)
        held = self._sessions.get(cookie or "")
        offered = [tool.get("name") for tool in held.session.tools] if held is not None else []
        if held is not None and path not in _OF_SESSIONS and (path not in _OF_THE_SERVER or path in offered):
            held.used = time.monotonic()
            output = await self.environment.call_tool(held.session, path, body)
            return Reply(200, {"output": output}, _set_cookie(cookie))
        if path == "seed_session":
            self.environment.check_row_with_resources(body, "request")
            session = await self.environment.seed(body)
            key = secrets.token_urlsafe(24)
            self._sessions[key] = _Held(session, time.monotonic())
            return Reply(200, {"tools": session.tools}, _set_cookie(key))
        if path == "verify":
            self.environment.check_row_with_resources(body, "request")
            response = _response(body["response"])
            held = self._sessions.pop(cookie or "", None)
            session = held.session if held is not None else await self.environment.seed_recorded(body)
            return await self._graded(body, response, session)
        if path == "verify_group":
            return await self._verify_group(body)
        if path == "run":
            return await self._run(body)
        if path == "aggregate_metrics":
            return Reply(200, aggregate(body["verify_responses"]))
        return Reply(404, {"error": f"no session for tool {path!r}; POST /seed_session first and send its cookie"})

    async def _run(self, body: dict[str, Any]) -> Reply:
        url = body.get("policy_base_url") or self._model_url
        if url is None:
            return Reply(400, {"error": "no model server: `policy_base_url` in the request, or --model-url"})
        self.environment.check_row_with_resources(body, "request")
        client = JsonClient(str(url))
        session = await self.environment.seed(body)
        try:
            model = str(body.get("policy_model_name") or POLICY_MODEL)
            steps = self.environment.config.max_steps or MAX_STEPS
            answer = await run_rollout(self.environment, body, session, client, model, steps)
        except BaseException:
            await self.environment.release(session)
            raise
        finally:
            await asyncio.to_thread(client.close)
        return await self._graded({**body, "response": answer}, _response(answer), session)

    async def _graded(self, body: dict[str, Any], response: Response, session: Session) -> Reply:
        """The verdict of a rollout that is over; its session is released."""
        try:
            if not self.environment.judges_groups:
                (verdict,) = await self.environment.judge_group(body, [response], [session])
            elif self._group_size is None:
                message = f"{self.environment.name} judges groups: POST /verify_group, or serve it with a group size"
                return Reply(400, {"error": message})
            else:
                verdict = await self._verdict_in_group(body, response, session)
        finally:
            await self.environment.release(session)
        return Reply(200, {**body, **_as_json(verdict)})

    async def _verdict_in_group(self, row: dict[str, Any], response: Response, session: Session) -> GradeResult:
        """Wait until the group is whole; whoever comes last has it judged."""
        key = f"{row.get(TASK_INDEX)} {prompt_key(row, 'request')}"
        group = self._groups.setdefault(key, [])
        mine = _Waiting(response, session, asyncio.get_running_loop().create_future())
        group.append(mine)
        try:
            if len(group) == self._group_size:
                del self._groups[key]
                judging = asyncio.ensure_future(self._judge(row, group))  # not the last client's, who may leave
                self._judging.add(judging)
                judging.add_done_callback(self._judging.discard)
            return await mine.verdict
        finally:
            if mine in group and self._groups.get(key) is group:  # its client is gone
                group.remove(mine)
                if not group:
                    del self._groups[key]

    async def _judge(self, row: dict[str, Any], group: list[_Waiting]) -> None:
        waiting = [each.verdict for each in group]
        try:
            sessions = [each.session for each in group]
            verdicts = await self.environment.judge_group(row, [each.response for each in group], sessions)
        except Exception as error:  # each of them answers with it
            for future in waiting:
                if not future.done():
                    future.set_exception(error)
            return
        for future, verdict in zip(waiting, verdicts, strict=True):
            if not future.done():
                future.set_result(verdict)

    async def _verify_group(self, body: dict[str, Any]) -> Reply:
        row = body["row"]
        self.environment.check_row_with_resources(row, "request")
        sessions: list[Session] = []
        try:
            for _ in body["responses"]:
                sessions.append(await self.environment.seed_recorded(row))
            responses = [_response(item) for item in body["responses"]]
            verdicts = await self.environment.judge_group(row, responses, sessions)
        finally:
            for session in sessions:
                await self.environment.release(session)
        return Reply(200, {"verdicts": [_as_json(verdict) for verdict in verdicts]})

    def _global_config(self, request: Request) -> dict[str, Any]:
        """NeMo-Gym's config of who serves what where. The address is the one that the client has reached."""
        here = urlsplit(self.url)
        asked = urlsplit(f"//{request.headers.get('host', here.netloc)}").hostname or here.hostname
        address = {"host": asked, "port": here.port}
        name = self.environment.name
        server = {"type": RESOURCES, "name": name}
        agent: dict[str, Any] = {**address, "entrypoint": "app.py", "resources_server": server}
        config: dict[str, Any] = {
            "head_server": address,
            name: {RESOURCES: {name: {**address, "entrypoint": "app.py", "domain": "other"}}},
            self._agent: {AGENTS: {"simple_agent": agent}},
        }
        if self._model_url is not None:
            model = urlsplit(self._model_url)
            where = {"host": model.hostname, "port": model.port or (443 if model.scheme == "https" else 80)}
            config[POLICY_MODEL] = {"responses_api_models": {"vllm_model": {**where, "entrypoint": "app.py"}}}
            agent["model_server"] = {"type": "responses_api_models", "name": POLICY_MODEL}
        return config

    def _instances(self, request: Request) -> list[dict[str, Any]]:
        config = self._global_config(request)
        host, port = config["head_server"]["host"], config["head_server"]["port"]
        return [
            {
                "process_name": instance,
                "server_type": kind,
                "name": next(iter(config[instance][kind])),
                "host": host,
                "port": port,
                "url": f"http://{host}:{port}",
                "pid": os.getpid(),
                "entrypoint": "app.py",
                "config_path": instance,
                "start_time": self._started,
                "status": "success",
            }
            for instance, kind in ((self.environment.name, RESOURCES), (self._agent, AGENTS))
        ]


def _set_cookie(key: str | None) -> tuple[tuple[str, str], ...]:
    return (("Set-Cookie", f"{COOKIE}={key}; HttpOnly; SameSite=Strict"),)


def _response(body: Mapping[str, Any]) -> Response:
    return Response.from_output(body["output"], truncated=bool(body.get("incomplete_details")))


def _as_json(verdict: GradeResult) -> dict[str, Any]:
    failure = verdict.failure
    if failure is None:
        return vars(verdict)
    masked = {"failure_kind": failure, "failure_reason": failure, "mask_sample": True}
    return {**vars(verdict), **masked, "instance_config": {"mask_sample": True}}


_STATISTICS: dict[str, Callable[[list[float]], float]] = {
    "mean": statistics.fmean,
    "max": max,
    "min": min,
    "median": statistics.median,
    "std": lambda values: statistics.stdev(values) if len(values) > 1 else 0.0,
}


def aggregate(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The body of NeMo-Gym's AggregateMetrics: each number of a set of verify answers, per task and over all."""
    tasks: dict[int, list[dict[str, float]]] = defaultdict(list)
    masked = 0
    for answer in answers:
        usage = (answer.get("response") or {}).get("usage") or {}
        fields = {**usage, **(answer.get("components") or {}), **answer}
        if answer.get("mask_sample") or not isinstance(fields.get("reward"), int | float):
            masked += 1
            continue
        numbers = {name: float(value) for name, value in fields.items() if isinstance(value, int | float)}
        tasks[int(answer.get(TASK_INDEX, 0))].append(numbers)
    everything = _described([numbers for rollouts in tasks.values() for numbers in rollouts])
    if masked:
        everything["masked"] = masked
    return {
        "group_level_metrics": [{**_described(tasks[task]), TASK_INDEX: task} for task in sorted(tasks)],
        "agent_metrics": everything,
        "key_metrics": {key: value for key, value in everything.items() if key.startswith("mean/")},
    }


def _described(rollouts: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    described: dict[str, Any] = {}
    for name in sorted({name for numbers in rollouts for name in numbers} - {TASK_INDEX, "_ng_rollout_index"}):
        values = [numbers[name] for numbers in rollouts if name in numbers]
        described |= {f"{kind}/{name}": statistic(values) for kind, statistic in _STATISTICS.items()}
    return described


_NOT_FOR_THE_MODEL = ("background", "stream", "store", "previous_response_id")


async def run_rollout(
    environment: Environment, row: Mapping[str, Any], session: Session, client: JsonClient, model: str, max_steps: int
) -> dict[str, Any]:
    """The Responses object of a whole rollout; its `output` has every turn."""
    asked = {k: v for k, v in row["responses_create_params"].items() if v is not None and k not in _NOT_FOR_THE_MODEL}
    begun = asked["input"]
    begun = [{"type": "message", "role": "user", "content": begun}] if isinstance(begun, str) else list(begun)
    said: list[dict[str, Any]] = []
    for step in range(max_steps):
        body = {**asked, "model": model, "input": begun + said}
        if session.tools:
            body["tools"] = session.tools
        response = await _ask(client, body)
        turn: list[dict[str, Any]] = response["output"]
        said.extend(turn)
        if response.get("incomplete_details") or step + 1 == max_steps:
            break
        calls = Response.from_output(turn).tool_calls
        if calls:
            for call in calls:
                arguments = call.parsed_arguments()
                if arguments is None:
                    output = f"error: the arguments of `{call.name}` are not a JSON object"
                else:
                    output = await environment.call_tool(session, call.name, arguments)
                said.append(function_call_output_item(call.call_id, output))
            continue
        question = await environment.follow_up(row, Response.from_output(said), session)
        if question is None:
            break
        said.append({"type": "message", "role": "user", "content": question})
    return {**response, "output": said}


async def _ask(client: JsonClient, body: dict[str, Any]) -> dict[str, Any]:
    try:
        answer, _ = await client.post("/responses", body)
        output = answer.get("output") if isinstance(answer, dict) else None
        if isinstance(output, list) and all(isinstance(item, dict) for item in output):
            return dict(answer)
        found, cause = f"no output items: {text_of(answer, 200)}", None
    except (HttpStatusError, ServerUnreachableError) as error:
        found, cause = str(error), error
    raise WorkerLostError(
        "the model server does not answer",
        where=f"{client.base_url}/responses",
        expected="an OpenAI Responses object",
        found=found,
        hints=(f"curl {client.base_url}/models",),
    ) from cause
