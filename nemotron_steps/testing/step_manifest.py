"""Checks of a step that run nothing: its manifest, its config model, its hints, what importing it does."""

import inspect
import json
import os
import subprocess
import sys
from importlib import import_module
from typing import Any, get_args

from nemotron_steps.errors import StepsError
from nemotron_steps.testing.step_subject import StepSubject
from nemotron_steps.testing.suite import NotApplicable, Suite, Unmet, told

HEAVY = frozenset({"torch", "ray", "vllm", "megatron", "transformers", "wandb", "tensorflow", "jax"})
"""Packages that may be imported when a step runs, and not before."""

SUITE: Suite[StepSubject] = Suite()


@SUITE.check()
def manifest_loads(step: StepSubject) -> None:
    """The manifest is found, and strict: no unknown key, no wrong type."""
    try:
        file = str(step.manifest.file)
    except StepsError as error:
        raise told(error, hint="pip install -e PACK, or put its folder on STEPS_PATH") from error
    for problem in step.registry.problems:
        if file in (problem.where or ""):
            raise told(problem)


@SUITE.check("manifest_loads")
def manifest_has_no_warnings(step: StepSubject) -> None:
    """Nothing in it is remarked on: it consumes or produces something."""
    for warning in step.registry.warnings:
        if (warning.where or "").startswith(f"{step.manifest.file}:") and "is hidden by" not in warning.what:
            raise told(warning)


@SUITE.check("manifest_loads")
def manifest_is_complete(step: StepSubject) -> None:
    """The step, every port and every parameter say what they are."""
    manifest = step.manifest
    for key in ("name", "category", "description", "version", "entry", "config_schema"):
        if not getattr(manifest.step, key):
            raise Unmet(f"[step] has no {key}", where=manifest.where("step"), hint=f'{key} = "…"')
    for table in ("consumes", "produces", "parameters"):
        for index, entry in enumerate(getattr(manifest, table)):
            if not entry.description:
                where, hint = manifest.where(table, index), 'description = "what it is, and its unit"'
                raise Unmet(f"'{entry.name}' has no description", where=where, hint=hint)


@SUITE.check("manifest_loads")
def id_is_its_own(step: StepSubject) -> None:
    """No other pack has a step of this id, so that the plain id means this one everywhere."""
    manifest = step.manifest
    plain = manifest.step.id
    others = [each for each in step.registry.hidden_steps.values() if each.step.id == plain]
    if manifest.hidden or others:
        packs = sorted({step.registry.steps[plain].pack, *(other.pack for other in others)} - {manifest.pack})
        where, hint = manifest.where("step", "id"), f'id = "{manifest.pack}/{plain.rpartition("/")[2]}"'
        raise Unmet(f"the packs {', '.join(packs)} have a step '{plain}' too", where=where, hint=hint)


@SUITE.check("manifest_loads")
def entry_takes_a_context(step: StepSubject) -> None:
    """The function of `entry` can be imported and takes one argument."""
    entry = step.manifest.step.entry
    if entry is None:
        raise NotApplicable("the step has no entry")
    module, _, name = entry.partition(":")
    where = step.manifest.where("step", "entry")
    try:
        function = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise Unmet(f"'{entry}' cannot be imported: {error}", where=where) from error
    try:
        inspect.signature(function).bind(object())
    except TypeError as error:
        hint = "def run(context: StepContext[MyConfig]) -> None"
        raise Unmet(f"'{entry}' cannot be called with one argument: {error}", where=where, hint=hint) from error


@SUITE.check("manifest_loads")
def config_model_is_strict(step: StepSubject) -> None:
    """The config model and every model in it are frozen and refuse unknown keys."""
    try:
        schema = step.schema
    except StepsError as error:
        raise told(error) from error
    for model in _models_in(schema, []):
        if model.model_config.get("extra") != "forbid" or not model.model_config.get("frozen"):
            name, hint = (
                f"{model.__module__}:{model.__qualname__}",
                'model_config = ConfigDict(frozen=True, extra="forbid")',
            )
            raise Unmet(f"{name} lets unknown keys or later changes through", hint=hint)


def _models_in(annotation: Any, found: list[Any]) -> list[Any]:
    """`found`, and behind it each model of an annotation, and of their fields, that is not among them."""
    from pydantic import BaseModel

    if isinstance(annotation, type) and issubclass(annotation, BaseModel) and annotation not in found:
        found.append(annotation)
        for info in annotation.model_fields.values():
            _models_in(info.annotation, found)
    for argument in get_args(annotation):
        _models_in(argument, found)
    return found


@SUITE.check("config_model_is_strict")
def parameters_exist(step: StepSubject) -> None:
    """Every `[[parameters]]` and every key that an input is bound to is a key of the config model."""
    from nemotron_steps.config.validation import has_key, nearest_keys

    named = [(p.name, step.manifest.where("parameters", i, "name")) for i, p in enumerate(step.manifest.parameters)]
    named += [(key, step.manifest.where_input(p.name, "bind")) for p in step.manifest.consumes for key in p.bindings]
    for name, where in named:
        if not has_key(step.schema, name):
            close = nearest_keys(step.schema, name)
            raise Unmet(f"'{name}' is not a key of the config", where=where, hint=", ".join(close) or None)


@SUITE.check("parameters_exist")
def every_config_composes(step: StepSubject) -> None:
    """Every file of configs is accepted by the config model."""
    for name in step.manifest.config_names or (None,):
        try:
            step.compose(config=name)
        except StepsError as error:
            raise told(error, f"config '{name or 'default'}': ") from error


@SUITE.check("every_config_composes")
def parameters_tell_their_defaults(step: StepSubject) -> None:
    """What the manifest says is a parameter's default is what the config `default` has."""
    names = step.manifest.config_names
    if names and "default" not in names:
        raise NotApplicable("the step has no config `default`")
    values = step.compose(config="default" if names else None, as_it_is=True).flat
    for index, parameter in enumerate(step.manifest.parameters):
        found = values.get(parameter.name)
        if parameter.default is not None and found != parameter.default:
            where = step.manifest.where("parameters", index, "default")
            both = f"{found!r} in the config, {parameter.default!r} in the manifest"
            raise Unmet(f"the default of '{parameter.name}' is not what the manifest says", where=where, found=both)


@SUITE.check("every_config_composes")
def choices_are_accepted(step: StepSubject) -> None:
    """The config model accepts every choice that the manifest offers."""
    for index, parameter in enumerate(step.manifest.parameters):
        for choice in parameter.choices:
            try:
                step.compose([f"{parameter.name}={json.dumps(choice)}"])
            except StepsError as error:
                where = step.manifest.where("parameters", index, "choices")
                given = f"{parameter.name}={choice}"
                raise told(error, f"the config refuses '{given}', which the manifest offers: ", where=where) from error


@SUITE.check("every_config_composes")
def overrides_can_be_pasted(step: StepSubject) -> None:
    """The overrides that a strategy or an error advises are accepted by the config, pasted together."""
    config = step.compose().values
    for table in ("strategies", "errors"):
        for index, entry in enumerate(getattr(step.manifest, table)):
            overrides = entry.overrides_for(config)
            try:
                step.compose(overrides)
            except StepsError as error:
                where = step.manifest.where(table, index, "override")
                raise told(error, f"the advised '{' '.join(overrides)}' is refused: ", where=where) from error


@SUITE.check("manifest_loads")
def importing_it_is_light(step: StepSubject) -> None:
    """The modules of the function and of the config, which a plan imports, import no framework and print nothing."""
    references = [step.manifest.step.entry, step.manifest.step.config_schema]
    modules = sorted({reference.partition(":")[0] for reference in references if reference})
    if not modules:
        raise NotApplicable("the step names no code")
    check_import(modules)


def check_import(modules: list[str], seconds: float = 20.0) -> None:
    """Import modules in a fresh process. Unmet if that imports a framework, prints, leaves threads or takes long."""
    code = (
        "import importlib, json, sys, threading\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "found = [sorted({n.partition('.')[0] for n in sys.modules}), threading.active_count() - 1]\n"
        "sys.stderr.write('KIT' + json.dumps(found))\n"
    )
    path = os.pathsep.join(entry for entry in sys.path if entry)
    words = [sys.executable, "-c", code, *modules]
    env = {**os.environ, "PYTHONPATH": path}
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=seconds, env=env)
    except subprocess.TimeoutExpired:
        raise Unmet(f"importing {', '.join(modules)} takes longer than {seconds:.0f} s") from None
    printed, mark, report = done.stderr.rpartition("KIT")
    if done.returncode or not mark:
        raise Unmet(f"importing {', '.join(modules)} fails", found=done.stderr[-500:])
    loaded, threads = json.loads(report)
    heavy = sorted(HEAVY & set(loaded))
    if heavy:
        hint = "import it inside of the function that needs it, or under `if TYPE_CHECKING:`"
        raise Unmet(f"importing {', '.join(modules)} imports {', '.join(heavy)}", hint=hint)
    if done.stdout or printed:
        raise Unmet(f"importing {', '.join(modules)} prints", found=repr((done.stdout + printed)[:200]))
    if threads:
        raise Unmet(f"importing {', '.join(modules)} leaves {threads} threads running")


@SUITE.check("every_config_composes")
def wrong_values_are_refused(step: StepSubject) -> None:
    """A value of the wrong kind for a parameter is an error with a code when the step is planned, not when it runs."""
    if not step.manifest.parameters:
        raise NotApplicable("the step has no parameters")
    for index, parameter in enumerate(step.manifest.parameters):
        override = f"{parameter.name}={{kit: [1]}}"
        try:
            step.compose([override])
        except StepsError:
            continue
        where = step.manifest.where("parameters", index, "name")
        hint = "give the field of the config model the type that it has"
        raise Unmet(f"the config accepts '{override}'", where=where, hint=hint)
