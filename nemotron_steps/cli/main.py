"""The console scripts `steps` and `nemotron`: parse, dispatch, exit code.

Hardly anything is imported before requests to stop are noted: until then Python itself ends the process.
"""

from __future__ import annotations

import sys

from nemotron_steps import stopping

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from nemotron_steps.errors import StepsError
    from nemotron_steps.session.run_request import UsageError

    Handler = Callable[[argparse.Namespace], int]

_GC_THRESHOLD = 50_000
"""Allocations between garbage collections while a command starts: imports allocate much and free nothing."""


def steps(argv: Sequence[str] | None = None) -> int:
    """`steps ...`; without `argv` as the whole program, for a run with a process that waits. Returns the exit code."""
    return _program(sys.argv[1:], "steps") if argv is None else _main(argv, "steps")


def nemotron(argv: Sequence[str] | None = None) -> int:
    """`nemotron ...`: `nemotron steps ...` is `steps ...`, the rest the recipes' commands. Returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    run = _program if argv is None else _main
    if arguments[:1] == ["steps"]:
        return run(arguments[1:], "nemotron steps")
    return run(arguments, "nemotron")


def _program(arguments: Sequence[str], prog: str) -> int:
    stopping.note()
    import atexit
    import os

    from nemotron_steps.cli.parser import build, split_passthrough
    from nemotron_steps.session.supervise import open_standard_streams

    atexit.register(stopping.ignore)  # the last to be called: it is all done
    open_standard_streams()
    if "_ARGCOMPLETE" in os.environ:
        from nemotron_steps.cli.completion import answer

        answer(build(prog))
    before, _ = split_passthrough(arguments)
    works = before[:1] == ["run"] or prog == "nemotron" or (before[:1] == ["artifacts"] and "--hf" in before)
    if not works or {"-d", "--dry-run", "-h", "--help"} & set(before):
        return _main(arguments, prog)
    from nemotron_steps.session.supervise import supervise

    def report(error: StepsError) -> int:
        from nemotron_steps.cli.errors import report

        return report(error, as_json="--json" in before)

    return supervise(lambda: _main(arguments, prog), report)


def _main(arguments: Sequence[str], prog: str) -> int:
    import gc

    from nemotron_steps.cli.errors import typed_as
    from nemotron_steps.cli.parser import split_passthrough

    gc.set_threshold(_GC_THRESHOLD, 50, 50)
    before, passthrough = split_passthrough(arguments)
    typed_as(prog, before)
    try:
        return _guarded(lambda: _dispatch(before, passthrough, prog), arguments, as_json="--json" in before)
    finally:
        typed_as("steps", ())


def _dispatch(arguments: list[str], passthrough: list[str], prog: str) -> int:
    from nemotron_steps.session.run_request import UsageError

    if prog == "nemotron":
        from nemotron_steps.cli.parser import parsed_recipe

        recipe, unknown, prog = parsed_recipe(arguments)
        if recipe is None:
            return 0
        namespace = recipe
    else:
        from nemotron_steps.cli.parser import build, refuse_flags_first

        parser = build(prog)
        refuse_flags_first(parser, arguments)
        namespace, unknown = parser.parse_known_args(arguments)
        for many in ("words", "settings"):
            # argparse gives back positionals that stand after a flag: `run STEP -c tiny key=value`.
            if hasattr(namespace, many):
                late = [word for word in unknown if not word.startswith("-")]
                setattr(namespace, many, [*getattr(namespace, many), *late])
                unknown = [word for word in unknown if word.startswith("-")]
    if unknown:
        raise _unknown_flag(unknown[0], namespace, prog)
    if namespace.version:
        from nemotron_steps import __version__

        print(__version__)
        return 0
    if namespace.command is None:
        parser.print_help()
        return 0
    if passthrough and namespace.command != "run":
        raise UsageError(f"`{prog} {namespace.command}` takes nothing after `--`", found=" ".join(passthrough))
    from importlib import import_module

    namespace.passthrough, namespace.prog = passthrough, prog
    module, _, name = namespace.handler.partition(":")
    handler: Handler = getattr(import_module(module), name)
    return handler(namespace)


def _unknown_flag(flag: str, namespace: argparse.Namespace, prog: str) -> UsageError:
    from nemotron_steps.config.names import meant
    from nemotron_steps.errors import did_you_mean
    from nemotron_steps.session.run_request import UsageError

    hidden = {"command", "handler", "words", "as_json"}
    flags = ["--" + name.replace("_", "-") for name in vars(namespace) if name not in hidden] + ["--json"]
    command = f"{prog} {namespace.command or ''}".rstrip() if prog.endswith("steps") else prog
    typed = flag.partition("=")[0]
    return UsageError(
        f"`{command}` has no flag '{typed}'",
        expected="one of its flags; a key of the config is set by KEY=VALUE, without dashes",
        hints=(*did_you_mean(meant(typed, [flag for flag in flags if flag != typed])), f"{command} --help"),
    )


def _guarded(action: Callable[[], int], arguments: Sequence[str], *, as_json: bool) -> int:
    try:
        try:
            with stopping.interruptible(tells=False):
                code = action()
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else 1
        sys.stdout.flush()
    except BrokenPipeError:  # the reader (`| head`) is gone
        _print_nowhere()
        return 0
    except (Exception, KeyboardInterrupt) as error:
        from contextlib import suppress

        from nemotron_steps.cli.errors import exit_code, report, secrets_apart
        from nemotron_steps.config.secrets import masking

        if stopping.was_interrupted(error) and exit_code(error) != exit_code(KeyboardInterrupt()):
            error = KeyboardInterrupt()  # what it became
        if isinstance(error, OSError) and (unwritten := _unwritten(error)) is not None:
            error, as_json = unwritten, as_json and unwritten.where is None
        with masking(secrets_apart(arguments)), suppress(OSError):  # nobody can be told
            return report(error, as_json=as_json)
        return exit_code(error)
    return code


def _print_nowhere() -> None:
    """What is still buffered must not raise again at exit."""
    import os

    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _unwritten(error: OSError) -> StepsError | None:
    """What to say of a write that failed for want of room, which is not this program's mistake; None for others."""
    import errno
    from os.path import dirname

    from nemotron_steps.cli.errors import location
    from nemotron_steps.errors import StorageError

    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
    if error.errno not in full or error.filename is not None or hasattr(error, "log_path"):
        return None
    where = None
    if dirname(__file__) == dirname(location(error) or ""):  # these modules print; others write files
        where = "standard output"
        _print_nowhere()
    hints = ("free some space, or send the output elsewhere, and run the same command again",)
    return StorageError(f"writing failed: {error.strerror}", where=where, hints=hints)


if __name__ == "__main__":
    sys.exit(steps())
