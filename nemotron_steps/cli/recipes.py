"""`nemotron super3 ...` and `nemotron nano3 ...`: the public recipes' own commands, each a step with its config.

`nemotron super3 rl rlvr ARGUMENTS` is `steps run rl/nemo_rl/rlvr -c rlvr1 ARGUMENTS`: the same flags, overrides and
passthrough. Names of configs are the recipe's; where it has one of another name here, CONFIGS says which.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nemotron_steps.cli.parser import HANDLERS, Parser, run_flags
from nemotron_steps.config.names import nearest
from nemotron_steps.session.run_request import UsageError


@dataclass(frozen=True)
class Recipe:
    """One command: what `steps run` gets for it.

    Attributes:
        target: step, or pipeline for a recipe of `stages` without `-c`.
        config: its config where no `-c` says another; None for a pipeline's own.
        summary: what help says.
        configs: name the recipe has → name here.
        only: configs it can have, by the recipe's names, where the step has others' as well; empty for any.
        samples: whether `--sample N` says how many rows of each data set are read.
        stages: without `-c`, stages of the pipeline PREPARATIONS up to the last of these; overrides are for all.
    """

    target: str
    config: str | None
    summary: str
    configs: Mapping[str, str] = field(default_factory=dict)
    only: tuple[str, ...] = ()
    samples: bool = False
    stages: tuple[str, ...] = ()


PREPARATIONS = "super3_data_prep"
_RL_PREP = "data_prep/rl_prep"
_SUPER3_BLENDS = ("rlvr1", "rlvr2", "rlvr3", "swe1", "swe2", "rlhf")


def _blend(name: str, *others: str) -> Recipe:
    configs = {each: f"super3_{each}" for each in (name, *others)}
    return Recipe(
        _RL_PREP,
        f"super3_{name}",
        f"prepare the prompts of {name.rstrip('123') if others else name}"
        + (f" (-c {'|'.join((name, *others))})" if others else ""),
        {"default": f"super3_{name}", **configs},
        samples=True,
        stages=(name, *others) if others else (),
    )


COMMANDS: Mapping[tuple[str, ...], Recipe] = {
    ("super3", "data", "prep", "rl"): Recipe(
        PREPARATIONS, None, "prepare the prompts of all six blends", samples=True, stages=_SUPER3_BLENDS
    ),
    ("super3", "data", "prep", "rl", "rlvr"): _blend("rlvr1", "rlvr2", "rlvr3"),
    ("super3", "data", "prep", "rl", "swe1"): _blend("swe1"),
    ("super3", "data", "prep", "rl", "swe2"): _blend("swe2"),
    ("super3", "data", "prep", "rl", "rlhf"): _blend("rlhf"),
    ("super3", "rl", "rlvr"): Recipe(
        "rl/nemo_rl/rlvr",
        "rlvr1",
        "RLVR stages (-c rlvr1|rlvr2|rlvr3|small|test|tiny)",
        {"default": "rlvr1", "tiny": "tiny_hybrid"},
    ),
    ("super3", "rl", "swe1"): Recipe(
        "rl/nemo_rl/swe",
        "swe1",
        "SWE 1: single steps of recorded agents (-c small|test|tiny)",
        {"default": "swe1", "tiny": "tiny_hybrid_steps"},
        only=("default", "swe1", "small", "test", "tiny"),
    ),
    ("super3", "rl", "swe2"): Recipe(
        "rl/nemo_rl/swe",
        "swe2",
        "SWE 2: an agent in a repository (-c tiny)",
        {"default": "swe2", "tiny": "tiny_hybrid"},
        only=("default", "swe2", "tiny"),
    ),
    ("super3", "rl", "rlhf"): Recipe(
        "rl/nemo_rl/rlhf",
        "super3",
        "RLHF with a generative reward model (-c small|test|tiny)",
        {"default": "super3", "tiny": "tiny_hybrid"},
    ),
    ("nano3", "data", "prep", "rl"): Recipe(
        _RL_PREP,
        "nano3",
        "prepare the prompts of the blend",
        {"default": "nano3"},
        samples=True,
    ),
    ("nano3", "rl"): Recipe(
        "rl/nemo_rl/rlvr",
        "nano3",
        "the RLVR stage (-c nano3|nano3_genrm|test|tiny)",
        {"default": "nano3", "tiny": "tiny_hybrid"},
    ),
}
_GROUPS = {
    ("steps",): "list, check and run steps; the same as `steps`",
    ("super3",): "the Super3 recipe",
    ("super3", "data"): "data of the Super3 recipe",
    ("super3", "data", "prep"): "prepare data of the Super3 recipe",
    ("super3", "rl"): "reinforcement learning stages of the Super3 recipe",
    ("nano3",): "the Nano3 recipe",
    ("nano3", "data"): "data of the Nano3 recipe",
    ("nano3", "data", "prep"): "prepare data of the Nano3 recipe",
}


def parsed(arguments: Sequence[str]) -> tuple[argparse.Namespace | None, list[str], str]:
    """The arguments of `nemotron` as those of `steps run`; None where help was printed instead.

    Returns:
        The namespace, flags that no parser knows, and the command that was found.

    Raises:
        UsageError: there is no such command, or it takes no such argument.
    """
    path = _path(arguments)
    rest = list(arguments[len(path) :])
    prog = " ".join(("nemotron", *path))
    recipe = COMMANDS.get(path)
    if recipe is None:
        _help_or_refuse(path, rest, prog)
        return None, [], prog
    meaning = f"{PREPARATIONS} --until {recipe.stages[-1]}" if recipe.stages else f"{recipe.target} -c {recipe.config}"
    parser = Parser(prog=prog, description=f"{recipe.summary}: `steps run {meaning}`", epilog=_below(path))
    run_flags(parser, words="key=value", help_words="overrides in Hydra's grammar: a.b=1, +a.b=1, ~a.b")
    if recipe.samples:
        parser.add_argument("--sample", type=int, metavar="N", help="at most N rows of each data set, to try things")
    parser.set_defaults(handler=f"{HANDLERS}run:run", command="run", version=False, sample=None)
    namespace, unknown = parser.parse_known_args(rest)
    namespace.words += [word for word in unknown if not word.startswith("-")]
    flags = [word for word in unknown if word.startswith("-")]
    if not flags:  # else what follows one may be its value
        _settle(namespace, recipe, path, prog)
    return namespace, flags, prog


def _settle(namespace: argparse.Namespace, recipe: Recipe, path: tuple[str, ...], prog: str) -> None:
    """Make what was parsed a request of `steps run`."""
    for word in namespace.words:
        if "=" not in word and not word.startswith(("~", "+")):
            below = [name for name in _children(path) if name == word]
            raise UsageError(
                f"`{prog}` takes overrides, key=value",
                found=word,
                hints=tuple(f"{prog} {name} ..." for name in below) or (f"{prog} --help",),
            )
    # The Nano3 page writes force=true, which forces the step as the flag does.
    forced = {word.partition("=")[2].lower() for word in namespace.words if word.partition("=")[0] == "force"}
    namespace.force = namespace.force or forced == {"true"}
    if forced <= {"true", "false"}:
        namespace.words = [word for word in namespace.words if word.partition("=")[0] != "force"]
    if namespace.sample is not None:
        namespace.words.append(f"sample={namespace.sample}")
    given = namespace.config
    if recipe.only and given is not None and given not in recipe.only and not re.search(r"[/.]", given):
        raise UsageError(
            f"`{prog}` has no config '{given}'",
            expected=f"{', '.join(recipe.only)}, or a file",
            hints=tuple(f"{prog} -c {name}" for name in nearest(given, recipe.only))
            or (f"{prog} -c {recipe.only[0]}",),
        )
    # A run that goes on says itself what it was asked for.
    if namespace.resume and not namespace.words and given is None:
        return
    if recipe.stages and given is None:
        namespace.until = namespace.until or recipe.stages[-1]
        every = (_of_stages(word, recipe.stages) for word in namespace.words)
        namespace.words = [PREPARATIONS, *(word for words in every for word in words)]
        return
    namespace.config = recipe.config if given is None else recipe.configs.get(given, given)
    namespace.words = [recipe.target, *namespace.words]


def _of_stages(override: str, stages: Sequence[str]) -> list[str]:
    """An override as the pipeline takes it: for the stage that it names, else for each."""
    key = override.lstrip("+~")
    sign = override[: len(override) - len(key)]
    return [override] if key.partition(".")[0] in stages else [f"{sign}{stage}.{key}" for stage in stages]


def respelled(hint: str, prog: str, flags: str) -> str:
    """A hint `steps run STEP -c CONFIG ...` as the recipe whose command was given has it, with the profile's flag.

    Args:
        prog: what was typed up to the command: `nemotron super3 rl rlvr`, or `steps`.
        flags: the profile's flag, empty for none.
    """
    found = re.fullmatch(r"steps run (\S+)(?: -c (\S+))?(?P<rest>( .*)?)", hint)
    if found is None:
        return hint
    target, config = found[1], found[2]
    command = hint
    for path, recipe in COMMANDS.items():
        name = next((theirs for theirs, ours in recipe.configs.items() if ours == config != recipe.config), config)
        if (
            prog.split()[1:2] == [path[0]]
            and recipe.target == target
            and (config == recipe.config or not recipe.only or name in recipe.only)
        ):
            chosen = "" if config is None or (config == recipe.config and name in (*path, path[0])) else f" -c {name}"
            command = f"nemotron {' '.join(path)}{chosen}{found['rest']}"
            break
    return f"{command} {flags}".rstrip()


def _path(arguments: Sequence[str]) -> tuple[str, ...]:
    """The longest command that the arguments begin with."""
    path: tuple[str, ...] = ()
    for word in arguments:
        if (*path, word) not in COMMANDS and (*path, word) not in _GROUPS:
            break
        path = (*path, word)
    return path


def _help_or_refuse(path: tuple[str, ...], rest: Sequence[str], prog: str) -> None:
    children = _children(path)
    if rest and rest[0] not in ("-h", "--help"):
        close = nearest(rest[0], children)
        raise UsageError(
            f"'{rest[0]}' is not a command"
            if not rest[0].startswith("-")
            else f"'{rest[0]}' stands before the command",
            expected=", ".join(children),
            hints=tuple(f"{prog} {name}" for name in close) or (f"{prog} --help",),
        )
    what = _GROUPS.get(path, "Post-training recipes as steps.")
    parser = Parser(prog=prog, description=what[0].upper() + what[1:], epilog=_below(path))
    parser.print_help()


def _children(path: tuple[str, ...]) -> list[str]:
    every = [*COMMANDS, *_GROUPS]
    return list(dict.fromkeys(each[len(path)] for each in every if len(each) > len(path) and each[: len(path)] == path))


def _below(path: tuple[str, ...]) -> str:
    """The commands below one, a line each."""
    lines = []
    for name in _children(path):
        each = (*path, name)
        lines.append(f"  {name:<8} {COMMANDS[each].summary if each in COMMANDS else _GROUPS[each]}")
    return "\n".join(["commands:", *lines]) if lines else ""
