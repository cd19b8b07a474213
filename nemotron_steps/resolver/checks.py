"""Checks of one step's config, the model it is given and the cluster it will run on, before a GPU is touched.

A check looks only at keys that are there, so that it holds for any step that has them.
"""

import re
import shlex
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from nemotron_steps.config.families import FAMILIES, ROPE_TYPES, misdescribed
from nemotron_steps.config.layout.constraints import Violation, violations
from nemotron_steps.config.layout.memory.devices import StepMemory
from nemotron_steps.config.layout.model_limits import (
    POLICY,
    ModelViolations,
    lengths_of,
    limit_violations,
    teacher_violations,
    template_file,
)
from nemotron_steps.config.layout.model_spec import ModelSpec
from nemotron_steps.config.layout.parallel_config import TEACHERS, ParallelConfig, read_teachers
from nemotron_steps.manifest.models import StepManifest
from nemotron_steps.resolver import problems
from nemotron_steps.resolver.layout import (
    generators_have_gpus,
    layout_fits,
    memory_fits,
    memory_of,
    profile_size,
    teachers_fit,
    vllm_fits,
)
from nemotron_steps.resolver.plan import InputSource, SuppliedInput
from nemotron_steps.resolver.request import StepConfig

_PLACEHOLDER = re.compile(r"\?\?\?|/?path/to/.*|<(your|path)[^<>]*>|(TODO|FIXME|CHANGE_?ME)\b.*", re.IGNORECASE)


@dataclass(frozen=True)
class CheckSubject:
    """One step to check."""

    key: str
    manifest: StepManifest
    config: StepConfig
    profile: Mapping[str, Any]
    """Of env.toml, that it will be launched with (nodes, gpus_per_node, …); empty for none."""
    artifacts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Port → what is recorded of the artifact that will be there, as far as it is known by now."""
    inputs: Mapping[str, InputSource] = field(default_factory=dict)
    origins: Mapping[str, SuppliedInput] = field(default_factory=dict)
    """Port → the supplied artifact that what is recorded was read from: its own, or one that it is made from."""

    def integer(self, key: str) -> int | None:
        """An integer config value, or None."""
        value = self.config.flat.get(key)
        return value if type(value) is int else None

    def recorded(self, port: str) -> Mapping[str, Any]:
        """What is recorded of the artifact at a port."""
        return self.artifacts.get(port, {})

    @cached_property
    def ports(self) -> dict[str, str]:
        """Config key → the port that is bound to it."""
        return {key: port.name for port in self.manifest.consumes for key in port.bindings}

    @cached_property
    def teachers(self) -> dict[str, str]:
        """Teacher → the port that brings it."""
        prefix = f"{TEACHERS}."
        return {key.removeprefix(prefix): port for key, port in self.ports.items() if key.startswith(prefix)}

    @cached_property
    def get(self) -> Callable[[str], Any]:
        """Config key → its value, None where there is none; with the teachers that inputs bring."""
        if not self.teachers:
            return self.config.flat.get
        return {**self.config.flat, TEACHERS: {**(self.config.flat.get(TEACHERS) or {}), **self.teachers}}.get

    @cached_property
    def sizes(self) -> ParallelConfig:
        """Of the config, and of the teachers that its inputs bring."""
        teachers = read_teachers(self.get)
        return replace(self.config.sizes, teachers=teachers) if teachers else self.config.sizes

    def where(self, key: str) -> str | None:
        """What set a config key."""
        return self.config.origin(key)

    def problem(
        self,
        kind: type[problems.PlanProblem],
        what: str,
        port: str | None = None,
        key: str | None = None,
        /,
        **said: Any,
    ) -> problems.PlanProblem:
        """What is wrong with the artifact at a port, or with the step, as a config key says."""
        at = self.key if port is None else f"{self.key}.{port}"
        return kind(what, chain=(at,), where=self.where(key) if key else None, **said)

    def folder(self, port: str) -> str | None:
        """The user's folder whose config.json and tokenizer the model of a port has; None where there is none."""
        return self.origins[port].folder if port in self.origins else None

    @cached_property
    def model(self) -> ModelSpec | None:
        """The model that the step trains, where it is known."""
        trained = (model for key, _, model in self.models if key == POLICY)
        return next(trained, None) or ModelSpec.from_scratch(self.config.flat.get)

    @cached_property
    def violations(self) -> list[Violation]:
        """What of the layout does not fit."""
        return violations(self.sizes, self.model)

    @cached_property
    def teacher_violations(self) -> tuple[ModelViolations, ...]:
        """What the layouts of distillation's teachers do not fit of their models."""
        models = {name: ModelSpec.from_attributes(self.recorded(port)) for name, port in self.teachers.items()}
        return tuple(teacher_violations(self.sizes, {name: model for name, model in models.items() if model}))

    @cached_property
    def memory(self) -> StepMemory | None:
        """What the step is predicted to take; see memory_of."""
        return memory_of(self)

    @property
    def turn_ends(self) -> dict[str, tuple[str, ...]]:
        """Port of a model that writes chats → the tokens that end its turns, where they are recorded."""
        recorded = {port: tuple(self.recorded(port).get("turn_ends") or ()) for _, port, _ in self.models}
        return {port: ends for port, ends in recorded.items() if ends}

    @cached_property
    def models(self) -> list[tuple[str, str, ModelSpec]]:
        """Config key, port and facts of every model that reads or writes chats, where it is known."""
        found: dict[str, tuple[str, str, ModelSpec]] = {}
        for key, port in self.ports.items():
            model = ModelSpec.from_attributes(self.recorded(port)) if lengths_of(key) is not None else None
            if model is not None:
                found.setdefault(port, (key, port, model))
        return list(found.values())


Check = Callable[[CheckSubject], Iterable[problems.PlanProblem]]


def is_placeholder(value: Any) -> bool:
    """Whether a value only stands where a real one has to go (`/path/to/…`, `???`, `<your …>`)."""
    return isinstance(value, str) and _PLACEHOLDER.fullmatch(value) is not None


def check_parameters(manifest: StepManifest, config: StepConfig, key: str) -> Iterator[problems.PlanProblem]:
    """Parameters the config model does not have, and values that are not among a parameter's choices."""
    for index, parameter in enumerate(manifest.parameters):
        name, flat = parameter.name, config.flat
        if config.has_key is not None and not config.has_key(name):
            what = f"parameter '{name}' of {manifest.id} is not a key of its config"
            yield problems.ParameterProblem(what, chain=(key,), where=manifest.where("parameters", index, "name"))
        elif name in flat and not parameter.allows(flat[name]):
            choices = [_shown(choice) for choice in parameter.choices]
            yield problems.ParameterProblem(
                f"'{name}' of {key} is not one of its choices",
                chain=(key,),
                where=config.origin(name) or manifest.where("parameters", index, "choices"),
                expected=" or ".join(choices),
                found=_shown(flat[name]),
                hints=tuple(f"{name}={choice}" for choice in choices[:3]),
            )


def check_placeholders(
    manifest: StepManifest, config: StepConfig, key: str, fed: Container[str]
) -> Iterator[problems.PlanProblem]:
    """Placeholder values, except at config keys that an input port fills in.

    `fed`: input ports that have a source, or whose lack of one was reported."""
    filled = {name for port in manifest.consumes if port.required or port.name in fed for name in port.bindings}
    for dotted, value in config.flat.items():
        if type(value) not in (str, list) or dotted in filled:
            continue
        for text in filter(is_placeholder, _texts(value)):
            yield problems.PlaceholderValue(
                f"'{dotted}' of {key} still has to be filled in",
                chain=(key,),
                where=config.origin(dotted),
                expected="a real value",
                found=text,
                hints=(f"{dotted}=VALUE",),
            )


def _texts(value: Any) -> list[str]:
    """The strings in a value, at any depth of lists."""
    if isinstance(value, list | tuple):
        return [text for item in value for text in _texts(item)]
    return [value] if isinstance(value, str) else []


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def check_attributes(
    manifest: StepManifest,
    known: Mapping[str, Mapping[str, Any]],
    *,
    key: str | None = None,
    sources: Mapping[str, str] | None = None,
) -> list[problems.PlanProblem]:
    """Every requirement and constraint of a step that the attributes of its inputs break.

    `known`: port → attributes of the artifact bound to it; what is missing breaks nothing. `sources`: port → where its
    artifact comes from, for messages."""
    key = key or manifest.id
    sources = sources or {}
    found: list[problems.PlanProblem] = []
    for port in manifest.consumes:
        have = known.get(port.name, {})
        for name, wanted in port.attributes.items():
            allowed = wanted if isinstance(wanted, list) else [wanted]
            if name not in have or have[name] in allowed:
                continue
            source = [sources[port.name]] if port.name in sources else []
            found.append(
                problems.AttributeConflict(
                    f"'{port.name}' of {key} needs another {name}",
                    chain=[*source, f"{key}.{port.name}"],
                    where=manifest.where_input(port.name, "attributes", name),
                    expected=" or ".join(str(value) for value in allowed),
                    found=str(have[name]),
                )
            )
    for index, constraint in enumerate(manifest.constraints):
        values = [
            (f"{port}.{name}", known[port][name], port)
            for place, name in constraint.terms
            for port in known
            if (port == place or port.startswith(f"{place}.")) and name in known[port]  # PORT.NAME: a port takes many
        ]
        for term, value, place in values[1:]:
            first_term, first_value, first = values[0]
            if value == first_value:
                continue
            found.append(
                problems.AttributeConflict(
                    constraint.description or f"{first_term} and {term} must be the same in {key}",
                    chain=(
                        f"{sources.get(first, first)} and {sources.get(place, place)}",
                        f"{key}.{first} and {key}.{place}",
                    ),
                    where=manifest.where("constraints", index),
                    expected=f"{term} = {first_value} (as {first_term})",
                    found=str(value),
                    hints=(f"--input {place}=PATH   # another one",) if "." in place else (),
                )
            )
    return found


def model_limits(subject: CheckSubject) -> Iterator[problems.PlanProblem]:
    """Models have the positions for what is asked of them, and a chat template (config/layout/model_limits.py)."""
    for key, port, model in subject.models:
        for each in limit_violations(key, port, model, subject.config.flat.get, subject.folder(port)):
            said = {"expected": each.expected, "found": each.found, "hints": each.hints}
            yield subject.problem(problems.ModelLimitProblem, each.what, port, each.where or key, **said)


def models_are_described(subject: CheckSubject) -> Iterator[problems.PlanProblem]:
    """What config.json of a model says of its layers and sizes can be (config/families.py). Told of the input that
    the user gave, and not again of what is made from it."""
    for port, source in subject.inputs.items():
        recorded = subject.recorded(port)
        family = FAMILIES.get(str(recorded.get("model_type")))
        if not isinstance(source, SuppliedInput) or family is None:
            continue
        # As it was published. Files of the home's own artifacts stay as they were hashed.
        paste = "hf download MODEL --local-dir AS-PUBLISHED   # and give AS-PUBLISHED in its place"
        if source.folder is not None:
            paste = f"hf download MODEL config.json --local-dir {shlex.quote(source.folder)}   # as it was published"
        for what, expected, found in misdescribed(recorded.get("shape", {}), family.kind):
            what = f"config.json of {source.ref} has {what}"
            said = {"expected": expected, "found": found, "hints": (paste,)}
            yield subject.problem(problems.ModelLimitProblem, what, port, **said)
        rope = recorded.get("rope_type", "default")
        converts = "checkpoint_megatron" in (made.type for made in subject.manifest.produces)
        if converts and rope not in ROPE_TYPES and port not in (name for _, name, _ in subject.models):
            what, hint = f"the rotary scaling of {source.ref} is not computed here", f"--input {port}=PATH"
            said = {"expected": f"rope_type {' | '.join(ROPE_TYPES)}", "found": rope}
            hints = (f"{hint}   # a model with one of these",)
            yield subject.problem(problems.ModelLimitProblem, what, port, **said, hints=hints)


def chats_can_be_written(subject: CheckSubject) -> Iterator[problems.PlanProblem]:
    """The policy's chat template writes messages of every role that the prompts have, and their tools."""
    policy = next((port for key, port, _ in subject.models if key == POLICY), None)
    recorded = subject.artifacts.get(policy or "", {})
    if policy is None or recorded.get("chat_roles") is None:
        return
    written = [*recorded["chat_roles"], *([] if recorded.get("chat_tools") is False else ["tools"])]
    for port, attributes in subject.artifacts.items():
        missing = [role for role in attributes.get("roles", ()) if role not in written]
        if missing:
            named = " and ".join(role if role == "tools" else f"{role} messages" for role in missing)
            what = f"'{port}' of {subject.key} has {named}, which the chat template of '{policy}' does not write"
            expected, found = ", ".join(attributes["roles"]), ", ".join(recorded["chat_roles"])
            copy = f"cp TEMPLATE.jinja {template_file(subject.folder(policy))}   # one that writes {named}"
            said = {"expected": expected, "found": found or "no message of any role", "hints": (copy,)}
            yield subject.problem(problems.ModelLimitProblem, what, policy, **said)


def prompts_are_graded(subject: CheckSubject) -> Iterator[problems.PlanProblem]:
    """Rows name the agents that grade them, or the config says who grades every row."""
    key, of_all, of_sets = "env.should_use_nemo_gym", "evaluation.environment", "evaluation.environments"
    flat, has_key = subject.config.flat, subject.config.has_key
    if flat.get(key) is not True or flat.get(of_all) is not None:
        return
    for port in subject.manifest.consumes:
        by_config = flat.get(f"{of_sets}.{port.name.partition('.')[2]}") is not None
        if by_config or subject.recorded(port.name).get("environments", True):
            continue
        compared = any(each.name == "reward_model" and each.required for each in subject.manifest.consumes)
        environment = "genrm_compare" if compared else "NAME   # one that `steps env list` shows"
        by_environment = f"{key}=false env.environment={environment}"
        by_function = ["reward=FILE.py:FUNCTION"] if has_key is None or has_key("reward") else []
        what = f"nothing grades '{port.name}' of {subject.key}: its rows name no agent, and the config no grader"
        hints = [by_environment, *by_function] if compared else [*by_function, by_environment]
        expected = "a reward function or an environment for all rows, or agent_ref.name in each row"
        yield subject.problem(problems.AttributeConflict, what, port.name, key, expected=expected, hints=hints)
        return


def judges_are_asked_as_trained(subject: CheckSubject) -> Iterator[problems.PlanProblem]:
    """A generative reward model compares answers that are laid out as in its training data."""
    judge, settings = "env.nemo_gym.genrm_model.", "env.nemo_gym.environments."
    for port in subject.manifest.consumes:
        trained = subject.recorded(port.name).get("comparison_layout")
        if trained is None or not any(key.startswith(judge) for key in port.bindings):
            continue
        flat = subject.config.flat
        told = {key: value for key, value in flat.items() if re.fullmatch(rf"{settings}\w+\.layout", key)}
        if trained not in (told.values() or ("roles",)):
            key = next(iter(told), f"{settings}genrm_compare.layout")
            what = f"'{port.name}' of {subject.key} was trained on comparisons laid out in another way"
            found, hint = str(told.get(key, "roles")), f"{key}={trained}"
            said = {"expected": hint, "found": found, "hints": (hint,)}
            yield subject.problem(problems.AttributeConflict, what, port.name, key, **said)


def sorted_data_is_served_in_order(subject: CheckSubject) -> Iterator[problems.PlanProblem]:
    """Data that was sorted on purpose is not shuffled."""
    if subject.config.flat.get("data.shuffle") is not True:
        return
    for port in subject.manifest.consumes:
        order = subject.recorded(port.name).get("order")
        if order is not None:
            what = f"'{port.name}' of {subject.key} is sorted by {order}, and would be shuffled"
            said = {"expected": "data.shuffle=false", "found": "data.shuffle=true", "hints": ("data.shuffle=false",)}
            yield subject.problem(problems.AttributeConflict, what, port.name, "data.shuffle", **said)


CHECKS: tuple[Check, ...] = (
    layout_fits,
    teachers_fit,
    model_limits,
    models_are_described,
    chats_can_be_written,
    prompts_are_graded,
    judges_are_asked_as_trained,
    vllm_fits,
    generators_have_gpus,
    profile_size,
    memory_fits,
    sorted_data_is_served_in_order,
)
"""What every plan is checked with."""
