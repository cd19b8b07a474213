"""Small worlds for tests: types, steps and configs from a few lines, and a resolver that runs in them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemotron_steps.errors import ArtifactError, ConfigError, PlanError
from nemotron_steps.manifest.loader import parse_step, read_toml
from nemotron_steps.manifest.models import StepManifest
from nemotron_steps.manifest.pipeline_models import PipelineManifest
from nemotron_steps.manifest.registry import Registry
from nemotron_steps.manifest.typegraph import ArtifactType, TypeGraph
from nemotron_steps.resolver.plan import Plan, StepOutput, SuppliedInput
from nemotron_steps.resolver.request import Request, StepConfig, request_for_pipeline, request_for_steps
from nemotron_steps.resolver.resolve import resolve

FILE = Path("pack/manifests")
MANY = """
[[consumes]]
name = "models"
type = "hf"
many = true
bind = "models"
[[produces]]
type = "report"
"""
"""A step that takes several models, each under a name."""


@dataclass
class World:
    """Everything `resolve` asks for.

    Attributes:
        configs: (step id, config name or None) → values; a missing None entry is an empty config.
        artifacts: reference → what it is; anything else does not exist.
    """

    registry: Registry
    configs: dict[tuple[str, str | None], dict[str, Any]] = field(default_factory=dict)
    artifacts: dict[str, SuppliedInput] = field(default_factory=dict)
    schemas: dict[str, set[str]] = field(default_factory=dict)
    composed: list[tuple[str, str | None, tuple[str, ...]]] = field(default_factory=list)

    def compose(self, step_id: str, config_name: str | None, overrides: Sequence[str]) -> StepConfig:
        self.composed.append((step_id, config_name, tuple(overrides)))
        if (step_id, config_name) not in self.configs and config_name is not None:
            raise ConfigError(f"step '{step_id}' has no config '{config_name}'")
        values = _copy(self.configs.get((step_id, config_name), {}))
        inputs = values.pop("inputs", {})
        for override in overrides:
            key, _, value = override.partition("=")
            node = values
            *parents, last = key.split(".")
            for part in parents:
                node = node.setdefault(part, {})
            node[last] = yaml.safe_load(value)
        overridden = {override.partition("=")[0]: f"override '{override}'" for override in overrides}
        schema = self.schemas.get(step_id)
        return StepConfig(
            values,
            inputs,
            None if schema is None else schema.__contains__,
            lambda key: overridden.get(key, f"configs/{step_id}/{config_name or 'default'}.yaml:1"),
        )

    def describe(self, ref: str, wanted: str) -> SuppliedInput:
        if ref not in self.artifacts:
            raise ArtifactError(f"there is no artifact '{ref}'", found=ref)
        return self.artifacts[ref]

    def plan(
        self,
        *steps: str,
        config: str | None = None,
        overrides: Sequence[str] = (),
        inputs: Mapping[str, str] | None = None,
        profile: Mapping[str, Any] | None = None,
    ) -> Plan:
        request = request_for_steps(steps, config_name=config, overrides=overrides, inputs=inputs)
        return self.resolve(request, profile)

    def plan_pipeline(self, pipeline: PipelineManifest, inputs: Mapping[str, str] | None = None) -> Plan:
        return self.resolve(request_for_pipeline(pipeline, inputs=inputs))

    def resolve(self, request: Request, profile: Mapping[str, Any] | None = None) -> Plan:
        return resolve(request, self.registry, compose=self.compose, describe_input=self.describe, profile=profile)


def _copy(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _copy(v) if isinstance(v, Mapping) else v for k, v in values.items()}


def types_of(**types: Any) -> TypeGraph:
    """`a="b c"`: a is_a b and c; `a={"b": "step"}`: a converts to b; `a=("b", {...})`: both; `a=""`: neither."""
    built = []
    for name, spec in types.items():
        parents, convert = (spec, None) if isinstance(spec, str) else ("", spec) if isinstance(spec, dict) else spec
        attributes = {"tokenizer": "digest", "architecture": "class"}
        built.append(ArtifactType(name, "", tuple(parents.split()), convert, attributes))
    return TypeGraph(built)


def step_of(tmp_path: Path, step_id: str, toml: str) -> StepManifest:
    """A manifest from the text below its [step] table, parsed from a file so that errors have lines."""
    file = tmp_path / FILE / f"{step_id.replace('/', '-')}.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f'[step]\nid = "{step_id}"\n{toml}')
    step, problems = parse_step(read_toml(file), pack="pack", config_dir=file.parent / "configs" / step_id)
    assert step is not None, problems
    return step


def world_of(tmp_path: Path, types: TypeGraph, steps: Mapping[str, str], **fields: Any) -> World:
    """`steps`: id → "in1 in2 -> out1 out2", or TOML. A port is `type`, `name:type`, with `?` for optional."""
    manifests = {}
    for step_id, spec in steps.items():
        toml = spec if "[[" in spec or "->" not in spec else _ports(spec)
        manifests[step_id] = step_of(tmp_path, step_id, toml)
    return World(Registry(manifests, {}, types), **fields)


def _ports(spec: str) -> str:
    text = ""
    for table, names in zip(("consumes", "produces"), spec.split("->"), strict=True):
        for item in names.split():
            name, _, type_name = item.rstrip("?").rpartition(":")
            text += f'[[{table}]]\ntype = "{type_name}"\nname = "{name or type_name}"\n'
            text += "required = false\n" if item.endswith("?") else ""
            text += f'bind = "{name or type_name}.path"\n' if table == "consumes" else ""
    return text


def wiring(plan: Plan) -> dict[str, dict[str, str]]:
    """key → port → `STEP.PORT` or the supplied reference."""
    return {step.key: {port: _label(source) for port, source in step.inputs.items()} for step in plan}


def _label(source: StepOutput | SuppliedInput) -> str:
    return source.ref if isinstance(source, SuppliedInput) else f"{source.step_key}.{source.port}"


def problems(world: World, *steps: str, **kwargs: object) -> list[tuple[str, str]]:
    """(code, sentence) of every problem of a plan that must fail."""
    with pytest.raises(PlanError) as raised:
        world.plan(*steps, **kwargs)  # type: ignore[arg-type]
    return [(p.code, p.what) for p in raised.value.problems]


def pipeline(*stages: dict[str, object]) -> PipelineManifest:
    return PipelineManifest.model_validate({"pipeline": {"name": "p"}, "stages": stages})
