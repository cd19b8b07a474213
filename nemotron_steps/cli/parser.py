"""Every command and flag: `steps` as one argparse tree, whose `handler`s name what does it; and `nemotron super3 …` and
`nemotron nano3 …`, the public recipes' own commands, each `steps run` of a step with its config."""

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from nemotron_steps.config.names import meant, nearest
from nemotron_steps.errors import did_you_mean
from nemotron_steps.session.run_request import RunRequest, UsageError

HANDLERS = "nemotron_steps.cli."
_MANY: Any = {"action": "append", "default": []}
_REF = "NAME, NAME:VERSION or digest"
_STEPS = "STEP|PIPELINE|key=value"
_THEN = "step ids or a pipeline, then overrides in Hydra's grammar: a.b=1, +a.b=1, ~a.b"
_EPILOG = """\
exit codes: 0 done, 1 the step failed, 2 the request is wrong, 3 retry may help, 130 interrupted

  steps list                               what there is
  steps run rl/nemo_rl/rlhf -c tiny        a whole alignment run on two CPU cores
  steps run STEP -c CONFIG --dry-run       the merged config and the plan, nothing runs
"""
_RUN_EPILOG = """\
overrides are for the last step named; STEP.key=value is for another one of a list, STAGE.key=value for a
stage of a pipeline. What stands after `--` is handed to a step that takes arguments.

  steps run rl/nemo_rl/rlhf -c tiny grpo.max_num_steps=20
  steps run rl/nemo_rl/rlhf -c tiny --input policy=PATH --input prompts=NAME:v2
  steps run rl/nemo_rl/rlvr -b PROFILE        then: steps logs RUN -f, steps status RUN, steps cancel RUN
"""


class Parser(argparse.ArgumentParser):
    """argparse, with errors raised as UsageError and the nearest command or flag named."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", _Help)
        super().__init__(**options, allow_abbrev=False, add_help=False)
        self.add_argument("-h", "--help", action="help", help="show this help and exit")

    def error(self, message: str) -> NoReturn:
        """Raise UsageError; `main` prints it and exits with 2."""
        raise UsageError(message, hints=(f"{self.prog} --help",))

    def _print_message(self, message: str, file: Any = None) -> None:
        # argparse's own keeps silent about help that cannot be written.
        (file or sys.stderr).write(message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            of_flag = f"value for {action.metavar}"
            raise UsageError(
                f"'{value}' is not a {'command' if isinstance(action, argparse._SubParsersAction) else of_flag}",
                expected=", ".join(choices),
                hints=did_you_mean(meant(str(value), choices)) or (f"{self.prog} --help",),
            )


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help with flags and their explanations in two columns; subcommands without argparse's extra line."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=100)

    def _format_action(self, action: argparse.Action) -> str:
        text = super()._format_action(action)
        return text.partition("\n")[2] if isinstance(action, argparse._SubParsersAction) else text


def build(prog: str) -> Parser:
    """The parser of `steps` (or of `nemotron steps`, which differs in its name only)."""
    parser = Parser(prog=prog, description="Composable, type-checked post-training steps.", epilog=_EPILOG)
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", parser_class=Parser)

    def add(name: str, handler: str, summary: str, into: Any = commands, **options: Any) -> Parser:
        command: Parser = into.add_parser(name, help=summary, description=summary, **options)
        command.set_defaults(handler=HANDLERS + handler)
        return command

    _catalog(add)
    command = add("plan", "run:plan", "type-check a step, a list of steps or a pipeline; nothing runs")
    _request(command)
    command.add_argument("-r", "--run", metavar="PROFILE", help="also check against this env.toml profile")
    command.add_argument("--why", action="store_true", help="say of each step that must run what changed")
    run_flags(add("run", "run:run", "run a step, a list of steps or a pipeline", epilog=_RUN_EPILOG))
    _history(add)
    _stored(add("home", "artifacts:home", "show what the home holds, and what `steps gc` would free"))
    command = add("gc", "artifacts:gc", "free what nothing needs: leftovers, work folders of finished runs")
    command.add_argument("--dry-run", action="store_true", help="say what would be freed; delete nothing")
    command.add_argument("--yes", action="store_true", help="delete without asking")
    old = "also the folders of runs that were done this many days ago; their artifacts stay"
    command.add_argument("--runs", type=float, metavar="DAYS", help=old)
    command.add_argument("--artifact", metavar="REF", help="also this version of an artifact; repeat for more", **_MANY)
    _stored(command)
    command = add("artifacts", "artifacts:list_artifacts", "list, show, trace, verify, add, export artifacts")
    command.set_defaults(type=None, name=None, home=None, as_json=False)
    _artifacts(add, command.add_subparsers(title="commands", dest="artifact_command", metavar="COMMAND"))
    _publish(add("publish", "artifacts:publish", "write a model card and upload a model to the Hugging Face hub"))
    command = add("env", "environments:list_environments", "list, show, check and serve reward environments")
    command.set_defaults(as_json=False)
    _environments(add, command.add_subparsers(title="commands", dest="env_command", metavar="COMMAND"))
    _stored(add("doctor", "doctor:doctor", "check this machine and say how to fix what is missing"))
    command = add("completion", "completion:completion", "print what makes a shell complete steps, configs and keys")
    shells = ("bash", "zsh", "fish", "tcsh")
    command.add_argument("shell", metavar="SHELL", choices=shells, help=", ".join(shells))
    command = add("explain", "catalog:explain", "say why an error or a signal is raised and what mends it")
    command.add_argument("code", metavar="CODE|SIGNAL", nargs="?", help="as in error[CODE] (default: list them)")
    _json(command)
    command = add("new", "scaffold:new", "write a new step, environment, executor, type or pipeline, with its test")
    kinds = "step (the default), environment, executor, type or pipeline"
    command.add_argument("what", metavar="[KIND] NAME", nargs="+", help=kinds)
    command.add_argument("--into", metavar="DIR", help="folder of the pack (default: ./steps_pack)")
    _json(command)
    return parser


def refuse_flags_first(parser: Parser, arguments: Sequence[str]) -> None:
    """UsageError for `steps --home DIR run …`: flags belong to commands, so they come after one."""
    if not arguments or not arguments[0].startswith("-") or arguments[0] in ("-h", "--help", "--version"):
        return
    commands = next(a.choices or () for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    takes_value = {"--home", "-c", "--config", "-r", "--run", "-b", "--batch", "--input", "--resume", "--name"}
    for at, word in enumerate(arguments):
        if word in commands and arguments[at - 1] not in takes_value:
            raise UsageError(
                f"'{arguments[0]}' stands before the command",
                expected=f"flags after `{word}`",
                hints=(shlex.join([parser.prog, word, *arguments[at + 1 :], *arguments[:at]]),),
            )


def _catalog(add: Callable[..., Parser]) -> None:
    command = add("list", "catalog:list_steps", "list the steps")
    command.add_argument("--category", metavar="C", help="only steps of this category")
    command.add_argument("--consumes", metavar="TYPE", help="only steps that take an artifact of this type")
    command.add_argument("--produces", metavar="TYPE", help="only steps that make an artifact usable as this type")
    command.add_argument("--tag", metavar="TAG", help="only steps with this tag", **_MANY)
    command.add_argument("--tree", action="store_true", help=argparse.SUPPRESS)
    _json(command)
    command = add("show", "catalog:show", "show one step: ports, parameters, configs, advice")
    command.add_argument("step", metavar="STEP", help="step id")
    _json(command)
    _json(add("types", "catalog:types", "list artifact types, what they can be used as and converted to"))


def run_flags(command: Parser, words: str = _STEPS, help_words: str = _THEN) -> None:
    """What `steps run` takes."""
    _request(command, words, help_words)
    attached = "run on this env.toml profile, attached: logs are streamed"
    command.add_argument("-r", "--run", metavar="PROFILE", help=attached)
    command.add_argument("-b", "--batch", metavar="PROFILE", help="run on this env.toml profile, detached")
    command.add_argument("--force-squash", action="store_true", help="rebuild the container's squash file (-r/-b)")
    asks = "submit without asking, however many GPU-hours it may take (-r/-b)"
    command.add_argument("--yes", action="store_true", help=asks)
    dry = "print the merged config and the plan; run nothing"
    command.add_argument("-d", "--dry-run", action="store_true", help=dry)
    command.add_argument("--resume", metavar="RUN", help="go on with an earlier run (its id, name or `latest`)")
    command.add_argument("--name", dest="run_name", metavar="NAME", help="what the run goes by, beside its id")


def _request(command: Parser, words: str = _STEPS, help_words: str = _THEN) -> None:
    command.add_argument("words", metavar=words, nargs="*", help=help_words)
    config = "config name, yaml file, or `auto`: cpu, one_gpu or one_node"
    command.add_argument("-c", "--config", metavar="CONFIG|PATH", help=config)
    supply = "supply an input: a path, NAME:VERSION, or a model name; repeat for more"
    command.add_argument("--input", metavar="PORT=REF", help=supply, **_MANY)
    begin = "begin a pipeline here: earlier results must be there"
    command.add_argument("--from", dest="first", metavar="STAGE", help=begin)
    command.add_argument("--until", metavar="STAGE", help="end a pipeline after this stage")
    over = "fan out: the step, or STAGE.KEY's of a pipeline, once for each value; repeat for combinations"
    command.add_argument("--over", metavar="KEY=V1,V2", help=over, **_MANY)
    ignore = "go on though this stage's results do not pass its checks; repeat for more"
    command.add_argument("--ignore-checks", metavar="STAGE", help=ignore, **_MANY)
    accept = "take the earlier result of this step or stage though its code changed since; repeat for more"
    command.add_argument("--accept", metavar="STEP", help=accept, **_MANY)
    command.add_argument("--force", action="store_true", help="the named steps run even if their results are cached")
    _stored(command)


def _history(add: Callable[..., Parser]) -> None:
    command = add("runs", "history:runs", "list the runs, newest last")
    command.add_argument("--limit", type=int, default=20, metavar="N", help="at most N runs (default: 20)")
    _stored(command)
    for name, handler, summary in (
        ("watch", "watch:watch", "show a run while it works: stages, curves, pace, signals, samples"),
        ("logs", "history:logs", "print a run's log; with --json its events and metrics, one record a line"),
        ("status", "history:status", "show what a run is doing or how it ended"),
        ("cancel", "history:cancel", "stop a run; what it committed stays"),
        ("report", "history:report", "write a run's report and print where it is"),
    ):
        command = add(name, handler, summary)
        count = None if name == "cancel" else "?"
        command.add_argument("run", metavar="RUN", nargs=count, default="latest", help="a run's id, name, or `latest`")
        if name == "watch":
            command.add_argument("--once", action="store_true", help="print one look at it and end")
            command.add_argument("--samples", action="store_true", help="with its latest samples")
            _stored(command, as_json=False)
            continue
        if name == "logs":
            command.add_argument("-f", "--follow", action="store_true", help="keep printing until the run ends")
        elif name == "report":
            command.add_argument("others", metavar="RUN", nargs="*", help="more runs: a comparison of all of them")
        _stored(command)
    command = add("index", "history:index", "write one page with every run and artifact, and print where it is")
    command.add_argument("--out", metavar="FILE", help="where to (default: index.html in the home)")
    _stored(command)


def _artifacts(add: Callable[..., Parser], into: Any) -> None:
    compared = "compare two artifacts of one type: exit code 0 if they hold the same, 1 if not"
    for name, summary, arguments in (
        ("list", "list artifacts", {}),
        ("show", "show one artifact: type, files, attributes, producer", {"ref": _REF}),
        ("lineage", "show what an artifact was made from", {"ref": _REF}),
        ("diff", compared, {"a": _REF, "b": "the other one"}),
        ("verify", "hash every file again and compare", {"ref": "artifacts to verify (default: all)"}),
        ("add", "copy a file or folder into the home as an artifact", {"path": "file or folder"}),
        ("path", "print the folder where an artifact lies, and nothing else", {"ref": _REF}),
        ("export", "copy an artifact's files out of the home", {"ref": _REF, "dir": "a new or an empty folder"}),
    ):
        command = add(name, f"artifacts:{name}_artifacts", summary, into)
        for argument, text in arguments.items():
            many = "*" if name == "verify" else None
            command.add_argument(argument, metavar=argument.upper(), nargs=many, help=text)
        if name == "list":
            command.add_argument("--type", metavar="TYPE", help="only artifacts usable as this type")
            command.add_argument("--name", metavar="NAME", help="only versions of this name")
        elif name == "add":
            command.add_argument("--type", metavar="TYPE", help="artifact type (default: recognised from the content)")
            command.add_argument("--name", metavar="NAME", help="artifact name (default: the file's)")
        elif name == "export":
            command.add_argument("--hf", action="store_true", help="as a Hugging Face folder, converted if it is none")
        _stored(command)


def _publish(command: Parser) -> None:
    command.add_argument("ref", metavar="REF", help=_REF)
    command.add_argument("repository", metavar="ORG/REPO", help="repository of the hub; made if it is not there")
    command.add_argument("--public", action="store_true", help="everybody may read it (default: a private repository)")
    folder = "write model and card there and upload nothing (without a token: ./ORG--REPO)"
    command.add_argument("--folder", metavar="DIR", help=folder)
    command.add_argument("--rows", action="store_true", help="the card shows the first rows of the data")
    _stored(command)


def _environments(add: Callable[..., Parser], into: Any) -> None:
    shown = "show one: its rule, what rows need, its settings, its agents"
    graded = "grade recorded NeMo-Gym rollouts again and compare the rewards"
    _json(add("list", "environments:list_environments", "list the environments", into))
    show = add("show", "environments:show_environment", shown, into)
    verify = add("verify", "environments:verify_rollouts", graded, into)
    serve = add("serve", "environments:serve_environment", "serve one over HTTP as NeMo-Gym's are", into)
    for command in (show, verify, serve):
        command.add_argument("environment", metavar="NAME", help="environment or agent")
        _json(command)
    verify.add_argument("rollouts", metavar="ROLLOUTS.jsonl", help="rows with `response` and `reward`")
    judge = "OpenAI-compatible endpoint (…/v1) that plays a judge's role (default: every role); repeat for more"
    for command in (verify, serve):
        command.add_argument("settings", metavar="KEY=VALUE", nargs="*", help="settings of the environment")
        command.add_argument("--judge", metavar="[ROLE=]URL", help=judge, **_MANY)
        command.add_argument("--judge-model", metavar="NAME", help="its model (default: the first that it lists)")
        command.add_argument("--judge-key", metavar="VARIABLE", help="environment variable with its API key")
    close = "rewards this close are the same (default: 1e-6)"
    verify.add_argument("--tolerance", type=float, default=1e-6, metavar="X", help=close)
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    serve.add_argument("--port", type=int, default=0, help="port to listen on (default: a free one)")


def _stored(command: Parser, *, as_json: bool = True) -> None:
    where = "where runs and artifacts are (default: STEPS_HOME or .steps)"
    command.add_argument("--home", metavar="DIR|URL", help=where)
    if as_json:
        _json(command)


def _json(command: Parser) -> None:
    command.add_argument("--json", action="store_true", dest="as_json", help="print JSON only")


def split_passthrough(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Arguments before and after the first bare `--`."""
    words = list(arguments)
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def request_of(arguments: argparse.Namespace) -> RunRequest:
    """The request in parsed arguments. UsageError if no step is named, or for an `--input` that is not PORT=REF."""
    overrides = [word for word in arguments.words if "=" in word or word.startswith(("~", "+"))]
    targets = [word for word in arguments.words if word not in overrides]
    if not targets:
        command = f"{arguments.prog} {arguments.command}"
        raise UsageError("name a step or a pipeline", hints=(f"{command} STEP", "steps list"))
    inputs: dict[str, str] = {}
    for text in arguments.input:
        port, equals, ref = text.partition("=")
        if not equals or not port or not ref:
            raise UsageError("an input is PORT=REF", where=f"--input {text}", hints=("--input policy=PATH",))
        if port in inputs:
            raise UsageError(f"input '{port}' is given twice", where=f"--input {text}", found=inputs[port])
        inputs[port] = ref
    return RunRequest(
        tuple(targets),
        tuple(overrides),
        arguments.config,
        inputs,
        arguments.run or getattr(arguments, "batch", None),
        tuple(getattr(arguments, "passthrough", ())),
        arguments.first,
        arguments.until,
        tuple(arguments.over),
        tuple(arguments.ignore_checks),
        getattr(arguments, "run_name", None),
    )


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


def parsed_recipe(args: Sequence[str]) -> tuple[argparse.Namespace | None, list[str], str]:
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
