"""What was asked for → a plan: which words are steps, what each config composes to, what a supplied input is.

The resolver decides; this gives it the registry, a composer and a way to look at what the user supplied.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemotron_steps.errors import ConfigError, RequestError, StepsError
from nemotron_steps.session.run_request import UsageError

if TYPE_CHECKING:
    from nemotron_steps.artifacts.store import ArtifactStore
    from nemotron_steps.config.compose import SearchPath
    from nemotron_steps.config.profiles import MirrorSettings, Profile
    from nemotron_steps.manifest.models import StepManifest
    from nemotron_steps.manifest.pipeline_models import PipelineManifest
    from nemotron_steps.manifest.registry import Registry
    from nemotron_steps.resolver.plan import Plan, SuppliedInput
    from nemotron_steps.resolver.request import Request, StepConfig
    from nemotron_steps.session.run_request import RunRequest

PASSTHROUGH_KEY = "passthrough"
"""Config key that receives the arguments after `--`, in steps that have one."""
AUTO = "auto"
"""`-c auto`: the config for the devices there are."""
_NODE_GPUS = 8
"""Of the configs named one_node."""


class Session:
    """Everything one command plans with, each part loaded when first needed.

    Args:
        home: `--home`; None for STEPS_HOME or `.steps`.
        in_job: this process is what a profile started: the profile was looked at where it was submitted, and its file
            may not be here.
        registry: where it was read already; None reads every manifest.
    """

    def __init__(self, home: str | None = None, *, in_job: bool = False, registry: Registry | None = None) -> None:
        self._home = home
        self.in_job = in_job
        self._registry = registry
        self._composed: dict[tuple[str, str | None, tuple[str, ...]], StepConfig] = {}

    @cached_property
    def registry(self) -> Registry:
        """Every manifest of every pack."""
        from nemotron_steps.artifacts.validators import declare
        from nemotron_steps.manifest.registry import load_registry

        registry = self._registry or load_registry()
        declare(registry.types.validators)
        return registry

    @cached_property
    def store(self) -> ArtifactStore:
        """The home's artifacts."""
        from nemotron_steps.artifacts.store import ArtifactStore

        return ArtifactStore(self._home)

    def settled(self, request: RunRequest, resume: str | None = None) -> RunRequest:
        """The request with steps by their ids, with `-c auto` as the config it stands for, with `-c NAME` as
        `./NAME.yaml`, where no step asked for has a config NAME and that file is, and with the name of the run that it
        goes on with."""
        request = replace(request, targets=tuple(map(self.registry.step_id, request.targets)))
        if resume and request.name is None:
            from nemotron_steps.runs.run_folder import get_run

            request = replace(request, name=get_run(self.store, resume).given_name or None)
        if request.config == AUTO:
            request = replace(request, config=self.device_config(request.targets[-1], request.profile))
        file, own = self._file_called(request)
        return request if own or file is None else replace(request, config=file)

    def _file_called(self, request: RunRequest) -> tuple[str | None, str | None]:
        """`./NAME.yaml` for `-c NAME`, if it is a file of the working directory, and the pipeline or first step asked
        for whose config NAME is meant instead."""
        from nemotron_steps.config.compose import is_path

        config, file = request.config, f"./{request.config}.yaml"
        if config is None or is_path(config) or not Path(file).is_file():
            return None, None
        if (pipeline := self._pipeline(request)) is not None:
            return file, pipeline.name
        steps = (self.registry.find_step(target) for target in request.targets)
        return file, next((s.id for s in steps if s is not None and config in self._search_path(s).names()), None)

    def device_config(self, target: str, profile_name: str | None) -> str | None:
        """What `-c auto` stands for: the step's config for the GPUs of a profile, or of this machine; its default, of a
        step that has none for devices. RequestError where it has some, and none for these; or for a pipeline."""
        profile = self.profile(profile_name)
        if profile is None or profile.on_this_machine:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            found = len(list(Path("/dev").glob("nvidia[0-9]*")))
            gpus = found if visible is None else min(found, len([n for n in visible.split(",") if n not in ("", "-1")]))
        else:
            gpus = 1 if profile.gpus_per_node is None else profile.gpus_per_node
        manifest = self.registry.find_step(target)
        if manifest is None and target in self.registry.pipelines:
            what = f"'{target}' is a pipeline, whose stages name their configs themselves"
            raise RequestError(what, where="-c auto", hints=(f"steps show {target}",))
        if manifest is None:
            return None  # planning it says that there is no such step
        names = self._search_path(manifest).names()
        fitting = [*(["one_node"] if gpus >= _NODE_GPUS else []), *(["one_gpu"] if gpus else ["cpu"])]
        there = [name for name in ("cpu", "one_gpu", "one_node") if name in names]
        if not there:
            return None
        for name in fitting:
            if name in there:
                return name
        raise RequestError(
            f"{target} has no config for {f'{gpus} GPUs' if gpus else 'a machine without GPUs'}",
            where="-c auto",
            expected=" or ".join(fitting),
            found=", ".join(there),
            hints=("-r PROFILE", *(["-c tiny"] if "tiny" in names else [])),
        )

    def plan(self, request: RunRequest, *, allow_unfilled: bool = False) -> Plan:
        """Resolve a request, as one that may still have to be filled in if so asked. PlanError with everything wrong
        with the chain and its profile; RequestError if the request itself makes no sense."""
        from nemotron_steps.config.profiles import NoImageError
        from nemotron_steps.resolver.resolve import resolve

        profile, known = None, []
        try:
            profile = self.profile(request.profile)
        except StepsError as error:
            known.append(error)
        found = resolve(
            self.chain(request),
            self.registry,
            compose=self.compose,
            describe_input=self.describe_input,
            newest=self.newest,
            profile=profile.offers if profile is not None else None,
            known=known,
            allow_unfilled=allow_unfilled,
        )
        file, own = self._file_called(request)
        notes = [f"-c {request.config} is that of {own}, not {file}"] if file and own else []
        try:
            job = self.job_profile(request, found, looked_up=False)
        except NoImageError as lacking:
            if not allow_unfilled:
                raise
            job = lacking.profile
        if profile is not None and job is not None:
            notes += _node_notes(found, profile, job, f"[{request.profile}]")
        return replace(found, warnings=(*found.warnings, *notes))

    def job_profile(self, request: RunRequest, plan: Plan, *, looked_up: bool = True) -> Profile | None:
        """The profile as a plan's job is submitted under it: with the image, the nodes and the GPUs of its steps.

        `looked_up`: the plan says which steps are cached; until then those of several images may be. ConfigError if an
        image is needed and nothing names one, or the steps have several.
        """
        from nemotron_steps.resolver.plan import job_of

        said = (where or "" for step in plan for key, (_, where) in step.job.items() if not key.startswith("cluster."))
        overrides = [where for where in said if where.startswith("override ")]
        if overrides and request.profile is None and not self.in_job:
            what = "run.env is for the job that a profile starts, and no profile is asked for"
            raise RequestError(what, where=overrides[0], hints=("-r PROFILE",))
        job = job_of(plan)
        return self.profile(request.profile, job if looked_up else {key: said[:2] for key, said in job.items()})

    def chain(self, request: RunRequest) -> Request:
        """The resolver's form of a request: a pipeline's stages, or steps to be chained."""
        from nemotron_steps.config.compose import is_path
        from nemotron_steps.resolver.request import request_for_steps
        from nemotron_steps.session.pipelines import fanned_out_step, pipeline_request

        pipeline = self._pipeline(request)
        if pipeline is not None:
            return pipeline_request(request, pipeline, self._has_key)
        if request.ignore_checks:
            raise UsageError("--ignore-checks names stages of a pipeline", found=" ".join(request.targets))
        if request.first is not None or request.until is not None:
            raise UsageError("--from and --until name stages of a pipeline", found=" ".join(request.targets))
        passthrough = self._passthrough(request) if request.passthrough else ()
        if request.over:
            return fanned_out_step(request, passthrough)
        own: list[tuple[str, ...]] = [() for _ in request.targets]
        for text in request.overrides:  # for the step of a list that it names (`STEP.key=value`), else for the last
            key = text.lstrip("+~")
            named = [n for n, target in enumerate(request.targets) if len(own) > 1 and key.startswith(f"{target}.")]
            position = named[0] if named else -1
            if named:
                text = text[: len(text) - len(key)] + key.removeprefix(f"{request.targets[position]}.")
            own[position] += (text,)
        own[-1] += passthrough
        chain = request_for_steps(request.targets, config_name=request.config, inputs=dict(request.inputs))
        goals = []
        for goal, overrides in zip(chain.goals, own, strict=True):
            manifest, config = self.registry.find_step(goal.step_id), goal.config_name
            if config is not None and manifest is not None and len(own) > 1:
                # Of a list, a file is for the last step, a name for all that have a config of that name.
                for_last = goal is chain.goals[-1] and (is_path(config) or bool(manifest.config_names))
                config = config if for_last or config in self._search_path(manifest).names() else None
            goals.append(replace(goal, config_name=config, overrides=overrides))
        return replace(chain, goals=tuple(goals))

    def compose(self, step_id: str, config_name: str | None, overrides: Sequence[str]) -> StepConfig:
        """The resolver's Compose: one step's config, composed and validated, with the model's defaults filled in."""
        from nemotron_steps.config.compose import compose
        from nemotron_steps.config.validation import complete, has_key, load_schema
        from nemotron_steps.resolver.request import StepConfig

        key = (step_id, config_name, tuple(overrides))
        if key in self._composed:
            return self._composed[key]
        manifest = self.registry.step(step_id)
        reference = manifest.step.config_schema
        schema = None if reference is None else load_schema(reference)
        try:
            found = compose(config_name, overrides, search=self._search_path(manifest), schema=schema)
        except ConfigError as error:
            # Written for another tool, with resolvers and defaults of its own: its ports can still be checked.
            if schema is not None or manifest.step.entry is not None:
                raise
            return self._composed.setdefault(key, StepConfig({}, unread=error.what))
        values, known = found.values, None
        if schema is not None:
            bound = frozenset(key for port in manifest.consumes for key in port.bindings)
            values, known = complete(found, schema, bound), partial(has_key, schema)
        config = StepConfig(values, found.inputs, known, found.origin, found.variables, job=found.job)
        self._composed[key] = config
        return config

    def describe_input(self, ref: str, wanted_type: str) -> SuppliedInput:
        """The resolver's DescribeInput; see `supplied_data.describe`."""
        from nemotron_steps.session.supplied_data import describe

        return describe(ref, wanted_type, self.store, self.registry)

    def newest(self, step_id: str, config_name: str | None, port: str) -> str | None:
        """The resolver's Newest."""
        from nemotron_steps.runs.step_workdir import artifact_name

        for artifact in reversed(self.store.list_artifacts(name=artifact_name(step_id, port))):
            made_by = artifact.producer
            if made_by is not None and made_by.step == step_id and config_name in (None, made_by.config):
                return artifact.ref
        return None

    def profile(self, name: str | None, job: Mapping[str, Sequence[Any]] | None = None) -> Profile | None:
        """An env.toml profile by name, as its executor reads it; None for no name, and in a job. `job`: as `job_of`."""
        if name is None or self.in_job:
            return None
        from nemotron_steps.config.profiles import load_environment
        from nemotron_steps.runs.executors.base import profile_model

        return load_environment().profile(name, profile_model, job)

    def profile_of(self, request: RunRequest, *, allow_unfilled: bool = False) -> Profile | None:
        """A request's profile; one that cannot be read is told with everything else that is wrong with the request."""
        try:
            return self.profile(request.profile)
        except StepsError:
            self.plan(request, allow_unfilled=allow_unfilled)
            raise

    def mirrors(self) -> MirrorSettings | None:
        """Where env.toml says that runs are mirrored; None without one, and in a job that does not see it."""
        from nemotron_steps.config.locations import ENVIRONMENT_VARIABLE, environment_files

        named = os.environ.get(ENVIRONMENT_VARIABLE)
        if named is None and not any(file.is_file() for file in environment_files()):
            return None
        # A job is told of the file that its submitter has; a pod or a cloud machine sees its volumes alone.
        if self.in_job and named and not Path(named).expanduser().is_file():
            return None
        from nemotron_steps.config.profiles import load_environment

        return load_environment().mirrors

    def _search_path(self, manifest: StepManifest) -> SearchPath:
        """Where a step's configs and their bases are: its own pack, then the others in their order."""
        from nemotron_steps.config.compose import SearchPath

        packs = sorted(self.registry.packs, key=lambda pack: pack.name != manifest.pack)
        configs = {pack.name: pack.configs for pack in packs if pack.configs is not None}
        alike = [step for step in self.registry.hidden_steps.values() if step.step.id == manifest.step.id]
        packs_alike = {self.registry.step(manifest.step.id).pack, *(step.pack for step in alike)} if alike else set()
        rivals = frozenset(configs[name] for name in packs_alike - {manifest.pack} if name in configs)
        return SearchPath(manifest.step.id, tuple(configs.values()), manifest.config_dir, rivals)

    def _has_key(self, step_id: str, key: str) -> bool:
        """Whether a step's config has a key; not, where the step has no config model."""
        from nemotron_steps.config.validation import has_key, load_schema

        schema = self.registry.step(step_id).step.config_schema
        return schema is not None and has_key(load_schema(schema), key)

    def _passthrough(self, request: RunRequest) -> tuple[str]:
        """The override that hands what stands after `--` to the last step. UsageError if it takes none."""
        last = request.targets[-1]
        if not self._has_key(last, PASSTHROUGH_KEY):
            what = f"step '{last}' takes nothing after `--`: its config has no key '{PASSTHROUGH_KEY}'"
            raise UsageError(what, found=" ".join(request.passthrough), hints=(f"steps show {last}",))
        quoted = ("'" + word.replace("\\", "\\\\").replace("'", "\\'") + "'" for word in request.passthrough)
        return (f"{PASSTHROUGH_KEY}=[{','.join(quoted)}]",)

    def _pipeline(self, request: RunRequest) -> PipelineManifest | None:
        """The pipeline a request names: by name, or by the path of its file."""
        find = self.registry.find_pipeline
        named = [target for target in request.targets if target.endswith(".toml") or find(target) is not None]
        if not named:
            if len(request.targets) == 1 and request.targets[0] in self.registry.broken:
                raise self.registry.broken[request.targets[0]]
            return None
        if len(request.targets) > 1:
            what = f"'{named[0]}' is a pipeline, and a pipeline is run alone"
            raise UsageError(what, found=" ".join(request.targets))
        if find(named[0]) is not None:
            return self.registry.pipeline(named[0])
        from nemotron_steps.manifest.registry import load_pipeline_file

        file = Path(named[0]).expanduser()
        if not file.is_file():
            raise RequestError("no such pipeline file", where=named[0], hints=("steps list",))
        return load_pipeline_file(file)


def _node_notes(plan: Plan, profile: Profile, job: Profile, named: str) -> list[str]:
    """Where the nodes of a plan's job are not those that its profile or its steps say."""
    notes = []
    if job.nodes != profile.nodes and "nodes" in profile.model_fields_set:
        notes = [f"the job has {job.nodes} nodes, as its steps say, and not the {profile.nodes} of {named}"]
    for step in plan:
        wanted, uses = (step.job.get(key, (None,))[0] for key in ("nodes", "cluster.num_nodes"))
        if wanted and uses and wanted > uses:
            notes.append(f"run.env.nodes={wanted}: {step.key} works on {uses} of them, its cluster.num_nodes")
    return notes
