"""`steps env list|show|verify|serve`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from nemotron_steps.cli.errors import print_json
from nemotron_steps.cli.terminal import Terminal, first_sentence, number
from nemotron_steps.environments.catalog import described, listed
from nemotron_steps.errors import DataError, RequestError
from nemotron_steps.session.jobs import printable

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from nemotron_steps.environments.base import Environment
    from nemotron_steps.environments.judged.judges import Judge
    from nemotron_steps.environments.recorded import Placed, Regraded

_SHOWN_DIFFERENCES = 20


def list_environments(args: argparse.Namespace) -> int:
    """`steps env list`."""
    found = listed()
    if args.as_json:
        return print_json([asdict(each) for each in found])
    out = Terminal.of()
    width = max(len(each.name) for each in found)
    rows = []
    for each in found:
        summary = first_sentence(printable(each.summary)) or out.style(f"from {printable(each.origin)}", "dim")
        rows.append([out.style(each.name.ljust(width), "bold"), summary])
    out.table(rows)
    return 0


def show_environment(args: argparse.Namespace) -> int:
    """`steps env show NAME`: the rule, what rows need, the settings, and the agents that lead there."""
    found = described(args.environment)
    if args.as_json:
        return print_json(asdict(found))
    out = Terminal.of()
    name = found.environment if found.asked == found.environment else f"{found.asked} → {found.environment}"
    out.print(f"{out.style(name, 'bold')}  {out.style(printable(found.origin), 'dim')}")
    for paragraph in filter(str.strip, found.text.split("\n\n")):
        out.wrap(printable(paragraph), indent=2)
    earns = "see the settings" if found.reward_range is None else "{:g} to {:g}".format(*found.reward_range)
    facts = [
        ("reward", earns),
        ("rows need", ", ".join(found.required_fields)),
        ("asks", ", ".join(found.judges)),
        ("judges", "the rollouts of a prompt together" if found.judges_groups else ""),
        ("runs", "whole rollouts against the policy's endpoint" if found.runs_agent else ""),
        ("agents", ", ".join(found.agents)),
        *(("preset", f"{key} = {json.dumps(value)}") for key, value in found.preset.items()),
    ]
    out.table([[out.style(label, "dim"), text] for label, text in facts if text], indent=2, below=4)
    out.print(f"  {out.style(f'settings (env.nemo_gym.environments.{found.asked}.KEY)', 'dim')}")
    settings = []
    for each in found.settings:
        value = "required" if each.required else f"= {_short(json.dumps(each.default))}"
        settings.append([out.style(each.name, "bold"), value, out.style(printable(each.text), "dim")])
    out.table(settings or [["none"]], indent=4)
    return 0


def verify_rollouts(args: argparse.Namespace) -> int:
    """`steps env verify NAME ROLLOUTS.jsonl`: recorded rollouts graded again. Exit code 1 where any reward differs."""
    import asyncio

    from nemotron_steps.environments.recorded import regrade

    environment = _created(args)
    rollouts = _rows(args.rollouts)

    async def collect() -> list[Regraded]:
        return [each async for each in regrade(environment, rollouts)]

    graded = asyncio.run(collect())
    if not graded:
        raise DataError(
            "the file has no rollouts",
            where=args.rollouts,
            hints=(f"wc -l {args.rollouts}", "ls *.jsonl"),
        )
    different = [each for each in graded if not each.agrees(args.tolerance)]
    if not args.as_json:
        _print_verified(graded, different, Terminal.of())
        return 1 if different else 0
    rewards = []
    for each in graded:
        verdict = each.verdict
        fields = {"where": each.where, "recorded": each.recorded, "reward": verdict.reward, "failure": verdict.failure}
        more = {"components": verdict.components, "details": verdict.details}
        rewards.append({**fields, "agrees": each.agrees(args.tolerance), **more})
    counts = {"rollouts": len(graded), "different": len(different)}
    print_json({"environment": environment.name, **counts, "rewards": rewards})
    return 1 if different else 0


def serve_environment(args: argparse.Namespace) -> int:
    """`steps env serve NAME`: until it is told to stop."""
    import signal
    import sys
    import threading

    from nemotron_steps.environments.remote.serving import EnvironmentServer

    environment = _created(args)
    stopped = threading.Event()
    before = {each: signal.signal(each, lambda *_: stopped.set()) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        with EnvironmentServer(environment, host=args.host, port=args.port) as server:
            if args.as_json:
                print_json({"environment": environment.name, "url": server.url})
            else:
                out = Terminal.of()
                out.print(f"{out.style(environment.name, 'bold')}  {out.style(server.url, 'cyan')}")
                agent = "env.nemo_gym.environments.MY_AGENT"
                key = f"{agent}.environment=remote {agent}.url={server.url}"
                out.print(f"  {out.style('a run uses it with', 'dim')} {key}")
                out.print(f"  {out.style('Ctrl-C ends it', 'dim')}")
            sys.stdout.flush()
            stopped.wait()
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    return 0


def _created(args: argparse.Namespace) -> Environment:
    """The environment that the command line asks for, with its settings and judges."""
    from nemotron_steps.environments.registry import environment_class, resolve, settings_of, unknown

    name = args.environment
    settings: dict[str, Any] = {}
    for word in args.settings:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise RequestError(
                f"'{word}' is not a setting",
                expected="KEY=VALUE, as under env.nemo_gym.environments.NAME",
                hints=("steps env show NAME   # its settings",),
            )
        try:
            settings[key] = json.loads(text)
        except ValueError:
            settings[key] = text
    found = resolve(name, {name: settings})
    if found is None:
        raise unknown(name)
    environment = environment_class(found[0])(settings_of(*found), _judges(args))
    missing = [role for role in environment.needed_judges() if role not in environment.judges]
    if missing:
        raise RequestError(
            f"environment `{environment.name}` needs a judge",
            expected=f"who plays {', '.join(missing)}",
            hints=tuple(f"--judge {role}=http://HOST:PORT/v1" for role in missing),
        )
    return environment


def _judges(args: argparse.Namespace) -> dict[str, Judge]:
    from nemotron_steps.config.layout.parallel_config import JUDGE_ROLES
    from nemotron_steps.environments.judged.judges import HttpJudge, served_model

    urls: dict[str, str] = {}
    for word in args.judge:
        role, equals, url = word.partition("=")
        if not equals or "/" in role:
            role, url = "", word
        if role and role not in JUDGE_ROLES:
            raise RequestError(
                f"'{role}' is not a judge's role",
                where=f"--judge {word}",
                expected=" or ".join(JUDGE_ROLES),
                hints=(f"--judge {JUDGE_ROLES[1]}={url}",),
            )
        urls.update(dict.fromkeys([role] if role else JUDGE_ROLES, url))
    key, model = args.judge_key, args.judge_model
    judges = {url: HttpJudge(url, model or served_model(url, key), api_key_env=key) for url in {*urls.values()}}
    return {role: judges[url] for role, url in urls.items()}


def _rows(path: str) -> Iterator[Placed]:
    from pathlib import Path

    from nemotron_steps.rows.lines import read_rows

    file = Path(path).expanduser()
    if not file.is_file():
        raise DataError(f"no such file: {path}", expected="a JSON Lines file", hints=("ls *.jsonl",))
    return ((row, f"{path}:{line}") for line, row in read_rows(file))


def _print_verified(graded: Sequence[Regraded], different: Sequence[Regraded], out: Terminal) -> None:
    for each in different[:_SHOWN_DIFFERENCES]:
        verdict = each.verdict
        here = number(verdict.reward) if verdict.reward is not None else f"not judged ({verdict.failure})"
        recorded = number(each.recorded) if each.recorded is not None else "none"
        where = f"{out.style('✗', 'red')} {printable(each.where)}"
        out.print(f"{where}  recorded {recorded}, here {out.style(here, 'bold')}")
        for name, value in (verdict.components | verdict.details).items():
            out.print(f"    {out.style(f'{name}:', 'dim')} {_short(value)}")
    if len(different) > _SHOWN_DIFFERENCES:
        out.print(f"  … {len(different) - _SHOWN_DIFFERENCES} more")
    rows = {"rollouts": str(len(graded)), "same reward": f"{len(graded) - len(different)} of {len(graded)}"}
    if ungraded := sum(each.verdict.reward is None for each in graded):
        rows["not judged here"] = str(ungraded)
    out.table([[out.style(label, "dim"), text] for label, text in rows.items()])


def _short(value: Any) -> str:
    text = printable(" ".join(str(number(value) if isinstance(value, float) else value).split()))
    return text if len(text) <= 160 else text[:157] + "..."
