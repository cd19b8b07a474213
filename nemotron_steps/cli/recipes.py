"""`nemotron super3 ...` and `nemotron nano3 ...`: the public recipes' own commands, each `steps run` of a step with its
config, whose name may be another one here."""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nemotron_steps.cli.parser import HANDLERS, Parser, run_flags
from nemotron_steps.config.names import nearest
from nemotron_steps.session.run_request import UsageError


@dataclass(frozen=True)
class Recipe:
    """One command: what `steps run` gets for it."""

    target: str
    """Step, or pipeline for a recipe of `stages` without `-c`."""
    config: str | None
    """Where no `-c` says another; None for a pipeline's own."""
    summary: str
    configs: Mapping[str, str] = field(default_factory=dict)
    """Name the recipe has → name here."""
    only: tuple[str, ...] = ()
    """Configs it can have, by the recipe's names, where the step has others' as well; empty for any."""
    samples: bool = False
    """Whether `--sample N` says how many rows of each data set are read."""
    stages: tuple[str, ...] = ()
    """Without `-c`, stages of the pipeline PREPARATIONS up to the last of these; overrides are for all."""


PREPARATIONS = "super3_data_prep"
_RL_PREP = "data_prep/rl_prep"
_SUPER3_BLENDS = ("rlvr1", "rlvr2", "rlvr3", "swe1", "swe2", "rlhf")


def _blend(name: str, *others: str) -> Recipe:
    every = (name, *others)
    configs = {"default": f"super3_{name}", **{each: f"super3_{each}" for each in every}}
    what = f"{name.rstrip('123')} (-c {'|'.join(every)})" if others else name
    stages = every if others else ()
    summary = f"prepare the prompts of {what}"
    return Recipe(_RL_PREP, f"super3_{name}", summary, configs, samples=True, stages=stages)


def _stage(step: str, config: str, summary: str, tiny: str = "tiny_hybrid", only: tuple[str, ...] = ()) -> Recipe:
    return Recipe(f"rl/nemo_rl/{step}", config, summary, {"default": config, "tiny": tiny}, only)


_ALL_BLENDS = "prepare the prompts of all six blends"
_NANO3_BLEND = "prepare the prompts of the blend"
_SWE1, _SWE2 = ("default", "swe1", "small", "test", "tiny"), ("default", "swe2", "tiny")
COMMANDS: Mapping[tuple[str, ...], Recipe] = {
    tuple(path.split()): recipe
    for path, recipe in {
        "super3 data prep rl": Recipe(PREPARATIONS, None, _ALL_BLENDS, samples=True, stages=_SUPER3_BLENDS),
        "super3 data prep rl rlvr": _blend("rlvr1", "rlvr2", "rlvr3"),
        "super3 data prep rl swe1": _blend("swe1"),
        "super3 data prep rl swe2": _blend("swe2"),
        "super3 data prep rl rlhf": _blend("rlhf"),
        "super3 rl rlvr": _stage("rlvr", "rlvr1", "RLVR stages (-c rlvr1|rlvr2|rlvr3|small|test|tiny)"),
        "super3 rl swe1": _stage(
            "swe", "swe1", "SWE 1: single steps of recorded agents (-c small|test|tiny)", "tiny_hybrid_steps", _SWE1
        ),
        "super3 rl swe2": _stage("swe", "swe2", "SWE 2: an agent in a repository (-c tiny)", only=_SWE2),
        "super3 rl rlhf": _stage("rlhf", "super3", "RLHF with a generative reward model (-c small|test|tiny)"),
        "nano3 data prep rl": Recipe(_RL_PREP, "nano3", _NANO3_BLEND, {"default": "nano3"}, samples=True),
        "nano3 rl": _stage("rlvr", "nano3", "the RLVR stage (-c nano3|nano3_genrm|test|tiny)"),
    }.items()
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


def parsed(args: Sequence[str]) -> tuple[argparse.Namespace | None, list[str], str]:
    """Arguments of `nemotron` as those of `steps run` (None: help was printed), unknown flags, the command."""
    path: tuple[str, ...] = ()
    for word in args:
        if (*path, word) not in COMMANDS and (*path, word) not in _GROUPS:
            break
        path = (*path, word)
    rest = list(args[len(path) :])
    prog = " ".join(("nemotron", *path))
    recipe = COMMANDS.get(path)
    if recipe is None:
        if rest and rest[0] not in ("-h", "--help"):
            children = _children(path)
            early = rest[0].startswith("-")
            raise UsageError(
                f"'{rest[0]}' stands before the command" if early else f"'{rest[0]}' is not a command",
                expected=", ".join(children),
                hints=[f"{prog} {name}" for name in nearest(rest[0], children)] or [f"{prog} --help"],
            )
        what = _GROUPS.get(path, "Post-training recipes as steps.")
        Parser(prog=prog, description=what[0].upper() + what[1:], epilog=_below(path)).print_help()
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
        words = [PREPARATIONS]
        for word in namespace.words:  # for the stage that it names, else for each
            key = word.lstrip("+~")
            sign = word[: len(word) - len(key)]
            of_one = key.partition(".")[0] in recipe.stages
            words += [word] if of_one else [f"{sign}{stage}.{key}" for stage in recipe.stages]
        namespace.words = words
        return
    namespace.config = recipe.config if given is None else recipe.configs.get(given, given)
    namespace.words = [recipe.target, *namespace.words]


def _children(path: tuple[str, ...]) -> list[str]:
    every = [*COMMANDS, *_GROUPS]
    return list(dict.fromkeys(each[len(path)] for each in every if len(each) > len(path) and each[: len(path)] == path))


def _below(path: tuple[str, ...]) -> str:
    lines = []
    for name in _children(path):
        each = (*path, name)
        lines.append(f"  {name:<8} {COMMANDS[each].summary if each in COMMANDS else _GROUPS[each]}")
    return "\n".join(["commands:", *lines]) if lines else ""
