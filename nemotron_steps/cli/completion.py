"""Shell completion of `steps`: commands and flags, steps, configs, keys and their values, inputs, profiles, runs.

`steps completion bash` prints what a shell evaluates; argcomplete then asks this program at every tab.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from nemotron_steps.cli.explain import explanations
from nemotron_steps.cli.request import Workbench
from nemotron_steps.config.profiles import load_environment
from nemotron_steps.config.search import is_path
from nemotron_steps.config.validation import known_keys, load_schema
from nemotron_steps.manifest.registry import load_registry
from nemotron_steps.runs.run_folder import list_runs

if TYPE_CHECKING:
    from nemotron_steps.manifest.models import StepManifest
    from nemotron_steps.manifest.registry import Registry

Completer = Callable[..., list[str]]


def completion(arguments: argparse.Namespace) -> int:
    """`steps completion SHELL`: the shell's part."""
    from argcomplete.shell_integration import shellcode

    print(shellcode(["steps"], shell=arguments.shell))
    return 0


def answer(parser: argparse.ArgumentParser) -> None:
    """Print what may stand where the shell's cursor is, and exit: argcomplete has set how in the environment."""
    import argcomplete

    for action in _actions(parser):
        completer = _COMPLETERS.get(str(action.metavar))
        if completer is not None:
            action.completer = completer  # type: ignore[attr-defined]  # argcomplete's place for it
    argcomplete.autocomplete(parser, always_complete_options=False)


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _actions(inner)
        else:
            yield action


def _words(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    """Steps and pipelines; once one is named, keys of the last step's config, and values of those that have few."""
    registry = load_registry()
    steps = _named(registry, parsed_args)
    if not steps or ("/" in prefix and "=" not in prefix):
        return [*registry.steps, *registry.pipelines]
    schema = steps[-1].step.config_schema
    if schema is None:
        return []
    key, given, _value = prefix.partition("=")
    if not given:
        return [f"{each}=" for each in known_keys(load_schema(schema))]
    choices = next((each.choices for each in steps[-1].parameters if each.name == key and each.choices), ())
    return [f"{key}={value}" for value in choices]


def _configs(parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    registry = load_registry()
    found = [name for step in _named(registry, parsed_args) for name in step.config_names]
    pipelines = [registry.pipelines[word] for word in _given(parsed_args) if word in registry.pipelines]
    return [*dict.fromkeys(found), *(name for each in pipelines for name in each.configs)]


def _inputs(parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    return [f"{port}=" for step in _named(load_registry(), parsed_args) for port in step.inputs]


def _profiles(**_: Any) -> list[str]:
    return list(load_environment().names)


def _runs(parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    store = Workbench(getattr(parsed_args, "home", None)).store
    return ["latest", *(run.id for run in list_runs(store))]


def _named(registry: Registry, parsed_args: argparse.Namespace) -> list[StepManifest]:
    found = [registry.find_step(word) for word in _given(parsed_args)]
    return [step for step in found if step is not None]


def _given(parsed_args: argparse.Namespace) -> list[str]:
    return [word for word in getattr(parsed_args, "words", None) or [] if not is_path(word)]


def _steps(**_: Any) -> list[str]:
    return list(load_registry().steps)


def _types(**_: Any) -> list[str]:
    return list(load_registry().types.types)


def _codes(**_: Any) -> list[str]:
    return list(explanations())


_COMPLETERS: dict[str, Completer] = {
    "STEP|PIPELINE|key=value": _words,
    "STEP": _steps,
    "CONFIG|PATH": _configs,
    "PORT=REF": _inputs,
    "PROFILE": _profiles,
    "RUN": _runs,
    "TYPE": _types,
    "CODE|SIGNAL": _codes,
}
"""By what the help calls the argument."""
