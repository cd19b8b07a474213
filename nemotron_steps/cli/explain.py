"""`steps explain CODE|SIGNAL`: why an error or a signal is raised, what raises it, and what mends it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from nemotron_steps.cli.errors import print_json
from nemotron_steps.cli.terminal import Terminal
from nemotron_steps.config.names import nearest
from nemotron_steps.errors import UnknownNameError

if TYPE_CHECKING:
    import argparse


def explanations() -> dict[str, dict[str, str]]:
    """Code → title, cause, mend, and for most example, setup and then (nemotron_steps/errors/explanations.toml)."""
    return _table("explanations.toml")


def explained_signals() -> dict[str, dict[str, Any]]:
    """Signal → title, cause, example (metric → its values, step by step), look and mend (errors/signals.toml)."""
    return _table("signals.toml")


def explain(arguments: argparse.Namespace) -> int:
    """`steps explain [CODE|SIGNAL]`: one of them, or the titles of all."""
    codes, signals = explanations(), explained_signals()
    if arguments.code is None:
        return _list(codes, signals, as_json=arguments.as_json)
    name = arguments.code.removeprefix("error[").removesuffix("]")
    code, signal = name.upper(), name.lower().replace("-", "_")
    if code in codes:
        _show(code, codes[code], as_json=arguments.as_json)
    elif signal in signals:
        _show(signal, signals[signal], as_json=arguments.as_json)
    else:
        is_code = re.match(r"E\d", code)
        close = nearest(code, codes) if is_code else [each for each in signals if signal in each]
        close = close or nearest(signal, signals)
        raise UnknownNameError(
            f"there is no error and no signal '{arguments.code}'",
            expected="a code like E303, as it stands in error[E303], or a signal like kl_spike",
            found=arguments.code,
            hints=(*(f"steps explain {each}" for each in close[:2]), "steps explain"),
        )
    return 0


def _table(name: str) -> dict[str, dict[str, Any]]:
    return tomllib.loads((files("nemotron_steps.errors") / name).read_text(encoding="utf-8"))


def _list(codes: Mapping[str, Mapping[str, Any]], signals: Mapping[str, Mapping[str, Any]], *, as_json: bool) -> int:
    if as_json:
        return print_json([{"code": code, **entry} for code, entry in {**codes, **signals}.items()])
    terminal = Terminal.of()
    for title, entries in (("errors", codes), ("signals of a training run", signals)):
        terminal.print(terminal.style(title, "dim"))
        terminal.table([[terminal.style(name, "bold"), entry["title"]] for name, entry in entries.items()], indent=2)
    return 0


def _show(name: str, entry: Mapping[str, Any], *, as_json: bool) -> None:
    advice = _advice(name)
    if as_json:
        print_json({"code": name, **entry, **({"advice": advice} if advice else {})})
        return
    terminal = Terminal.of()
    terminal.print(f"{terminal.style(name, 'bold')}  {entry['title']}")
    terminal.print()
    terminal.wrap(entry["cause"])
    if "example" in entry:
        terminal.print()
        terminal.print(terminal.style("For example", "dim"))
        for line in _example(entry):
            terminal.print(f"  {line.encode('unicode_escape').decode()}")
    if "look" in entry:
        terminal.print()
        terminal.print(terminal.style("Where to look", "dim"))
        terminal.wrap(entry["look"], indent=2)
    terminal.print()
    terminal.print(terminal.style("What mends it", "dim"))
    terminal.wrap(entry["mend"], indent=2)
    if "then" in entry:
        terminal.print(f"  {terminal.style(entry['then'], 'cyan')}")
    for overrides, steps in advice.items():
        terminal.print(f"  {terminal.style(overrides, 'cyan')}   # {', '.join(steps)}")


def _example(entry: Mapping[str, Any]) -> list[str]:
    """The lines of an example: commands, or metrics step by step."""
    example = entry["example"]
    if isinstance(example, str):
        return [line for line in (entry.get("setup"), example) if line is not None]
    return [f"{metric}: {values}" for metric, values in example.items()]


def _advice(signal: str) -> dict[str, list[str]]:
    """What manifests advise against a signal: overrides → the steps that have them."""
    if signal not in explained_signals():
        return {}
    from nemotron_steps.manifest.registry import load_registry

    found: dict[str, list[str]] = {}
    for step_id, manifest in load_registry().steps.items():
        answers = [strategy for strategy in manifest.strategies if signal in strategy.signal and strategy.override]
        if answers:
            found.setdefault(" ".join(text for each in answers for text in each.overrides_for({})), []).append(step_id)
    return found
