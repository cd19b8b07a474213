"""Shell completion of `steps`: commands and flags, steps, configs, keys, inputs, profiles, runs, artifacts."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from argcomplete.finders import CompletionFinder

from nemotron_steps.config.compose import is_path
from nemotron_steps.config.profiles import load_environment
from nemotron_steps.config.validation import known_keys, load_schema
from nemotron_steps.environments.registry import names as environment_names
from nemotron_steps.manifest.registry import load_registry
from nemotron_steps.runs.run_folder import list_runs
from nemotron_steps.session.session import Session

if TYPE_CHECKING:
    from nemotron_steps.manifest.models import StepManifest

Completer = Callable[..., list[str]]


def completion(args: argparse.Namespace) -> int:
    """`steps completion SHELL`: the shell's part."""
    from argcomplete.shell_integration import shellcode

    print(shellcode(["steps"], shell=args.shell))
    return 0


def answer(parser: argparse.ArgumentParser) -> None:
    """Print what may stand where the shell's cursor is, and exit: argcomplete has set how in the environment."""
    parsers = [parser]
    for each in parsers:
        for action in each._actions:
            completer = _COMPLETERS.get(str(action.metavar)) or _OF_ARGUMENTS.get(action.dest)
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
            elif completer is not None:
                action.completer = completer  # type: ignore[attr-defined]  # argcomplete's place for it
    _Finder()(parser, always_complete_options=False)


class _Finder(CompletionFinder):  # type: ignore[misc]  # it has no types
    """argcomplete, with flags put before steps and keys: argparse ends a list of words at the first flag."""

    def _get_completions(self, comp_words: list[str], *rest: Any) -> Any:
        assert self._parser is not None
        commands = next(each for each in self._parser._actions if isinstance(each, argparse._SubParsersAction)).choices
        command = commands.get(comp_words[1]) if len(comp_words) > 1 else None
        if command is not None and "words" in {action.dest for action in command._actions}:
            plain: list[str] = []
            flags: list[str] = []
            left = iter(comp_words[2:])
            for word in left:
                action = command._option_string_actions.get(word)
                value = next(left, None) if action is not None and action.nargs != 0 else ""
                if value is None:
                    flags, plain = [], [*plain, *flags, word]
                elif action is None:
                    plain.append(word)
                else:
                    flags += [word, value] if value else [word]
            comp_words = [*comp_words[:2], *flags, *plain]
        return super()._get_completions(comp_words, *rest)  # type: ignore[no-untyped-call]


def _words(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    """Steps and pipelines; once a step is named, keys of its config."""
    registry = load_registry()
    named = _steps(parsed_args)
    if not named or "/" in prefix:
        return [*registry.steps, *registry.pipelines]
    return _keys(parsed_args)


def _keys(parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    """`KEY=` of the last step named."""
    schemas = [step.step.config_schema for step in _steps(parsed_args)[-1:]]
    return [f"{key}=" for schema in schemas if schema for key in known_keys(load_schema(schema))]


def _configs(parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    registry = load_registry()
    found = ["auto", *(name for step in _steps(parsed_args) for name in step.config_names)]
    for word in parsed_args.words or ():
        if word in registry.pipelines:
            found += registry.pipelines[word].configs
    return [*dict.fromkeys(found)]


def _refs(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    """Artifacts of the home by name; by name and version, once there is a colon."""
    store = Session(getattr(parsed_args, "home", None)).store
    name, versioned, _version = prefix.rpartition(":")
    return [f"{name}:v{each}" for each in store.versions(name)] if versioned else store.names()


def _runs(parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    runs = list_runs(Session(getattr(parsed_args, "home", None)).store)
    return [*dict.fromkeys(["latest", *(run.given_name for run in runs if run.given_name), *(run.id for run in runs)])]


def _steps(parsed_args: argparse.Namespace) -> list[StepManifest]:
    registry = load_registry()
    found = [registry.find_step(word) for word in getattr(parsed_args, "words", None) or () if not is_path(word)]
    return [step for step in found if step is not None]


_COMPLETERS: dict[str, Completer] = {
    "STEP|PIPELINE|key=value": _words,
    "STEP": lambda **_: list(load_registry().steps),
    "CONFIG|PATH": _configs,
    "PORT=REF": lambda parsed_args, **_: [f"{port}=" for step in _steps(parsed_args) for port in step.inputs],
    "KEY=V1,V2": _keys,
    "PROFILE": lambda **_: list(load_environment().names),
    "RUN": _runs,
    "REF": _refs,
    "TYPE": lambda **_: list(load_registry().types.types),
}

_OF_ARGUMENTS: dict[str, Completer] = {"environment": lambda **_: environment_names(), "name": _refs}
"""By the argument, where the help has a word that others have too."""
