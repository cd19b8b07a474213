"""What was asked for → a plan: which words are steps, what each config composes to, what a supplied input is.

The resolver decides; this gives it the registry, a composer and a way to look at what the user supplied.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemotron_steps.errors import ArtifactError, ConfigError, RequestError, StepsError, UnknownNameError, did_you_mean
from nemotron_steps.session.run_request import UsageError

if TYPE_CHECKING:
    from nemotron_steps.artifacts.store import ArtifactStore
    from nemotron_steps.config.compose import ComposedConfig
    from nemotron_steps.config.mirrors import MirrorSettings
    from nemotron_steps.config.profiles import Profile
    from nemotron_steps.config.search import SearchPath
    from nemotron_steps.manifest.models import StepManifest
    from nemotron_steps.manifest.pipeline_models import PipelineManifest
    from nemotron_steps.manifest.registry import Registry
    from nemotron_steps.resolver.plan import Plan, SuppliedInput
    from nemotron_steps.resolver.request import Goal, Request, StepConfig
    from nemotron_steps.session.run_request import RunRequest

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
PASSTHROUGH_KEY = "passthrough"
"""Config key that receives the arguments after `--`, in steps that have one."""


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
        self.respell: Callable[[str], str] = str
        """How a hint that is a command is written for what was typed."""
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

    def settled(self, asked: RunRequest) -> RunRequest:
        """The request with `-c NAME` as `./NAME.yaml`, where no step asked for has a config NAME and that file is."""
        file = self._file_called(asked)
        return asked if file is None or self._own_config(asked) else replace(asked, config=file)

    def _file_called(self, asked: RunRequest) -> str | None:
        """`./NAME.yaml` for `-c NAME`, if it is a file of the working directory."""
        from nemotron_steps.config.search import is_path

        if asked.config is None or is_path(asked.config):
            return None
        file = f"./{asked.config}.yaml"
        return file if Path(file).is_file() else None

    def _own_config(self, asked: RunRequest) -> str | None:
        """The first step asked for that has a config of that name; a pipeline's `-c` is always for its steps."""
        pipeline = self._pipeline(asked)
        if pipeline is not None:
            return pipeline.name
        steps = (self.registry.find_step(target) for target in asked.targets)
        return next((s.id for s in steps if s is not None and asked.config in self._search_path(s).names()), None)

    def plan(self, asked: RunRequest, *, allow_unfilled: bool = False) -> Plan:
        """Resolve a request, as one that may still have to be filled in if so asked.

        Raises:
            PlanError: everything wrong with the chain, and with the profile it is to run on.
            RequestError: the request itself makes no sense.
        """
        from nemotron_steps.config.profiles import NoImageError
        from nemotron_steps.resolver.problems import raise_all
        from nemotron_steps.resolver.resolve import resolve

        profile, known = None, []
        try:
            profile = self.profile(asked.profile)
        except StepsError as error:
            known.append(error)
        try:
            request = self.request(asked)
        except StepsError as error:
            if known:
                raise_all([*known, error], f"cannot plan '{asked.command}'")
            raise
        try:
            found = resolve(
                request,
                self.registry,
                compose=self.compose,
                describe_input=self.describe_input,
                newest=self.newest,
                profile=profile.offers if profile is not None else None,
                known=known,
                allow_unfilled=allow_unfilled,
            )
        except StepsError as error:
            self._respell(problems := getattr(error, "problems", ()))
            key = "container_image"
            said = [{key: each.job[key]} for each in self._composed.values() if key in each.job]
            try:
                self.profile(asked.profile if profile and not allow_unfilled else None, said[0] if said else {})
            except NoImageError as lacking:
                raise_all([*problems, lacking], f"cannot plan '{request.command}'")
            raise
        self._respell(found.unfilled)
        file = self._file_called(asked)
        if file is not None:
            warning = f"-c {asked.config} is that of {self._own_config(asked)}, not {file}"
            found = replace(found, warnings=(*found.warnings, warning))
        try:
            job = self.job_profile(asked, found, looked_up=False)
        except NoImageError as lacking:
            if not allow_unfilled:
                raise
            job = lacking.profile
        if profile is None or job is None:
            return found
        notes = []
        if job.nodes != profile.nodes and "nodes" in profile.model_fields_set:
            notes = [
                f"the job has {job.nodes} nodes, as its steps say, and not the {profile.nodes} of [{asked.profile}]"
            ]
        for step in found:
            wanted, uses = (step.job.get(key, (None,))[0] for key in ("nodes", "cluster.num_nodes"))
            if wanted and uses and wanted > uses:
                notes.append(f"run.env.nodes={wanted}: {step.key} works on {uses} of them, its cluster.num_nodes")
        return replace(found, warnings=(*found.warnings, *notes))

    def job_profile(self, asked: RunRequest, plan: Plan, *, looked_up: bool = True) -> Profile | None:
        """The profile as a plan's job is submitted under it: with the image, the nodes and the GPUs of its steps.

        Args:
            looked_up: the plan says which steps are cached; until then those of several images may be.

        Raises:
            ConfigError: an image is needed and nothing names one, or the steps have several.
        """
        from nemotron_steps.resolver.plan import job_of

        said = (where or "" for step in plan for key, (_, where) in step.job.items() if not key.startswith("cluster."))
        overrides = [where for where in said if where.startswith("override ")]
        if overrides and asked.profile is None and not self.in_job:
            raise RequestError(
                "run.env is for the job that a profile starts, and no profile is asked for",
                where=overrides[0],
                hints=("-r PROFILE",),
            )
        job = job_of(plan)
        return self.profile(asked.profile, job if looked_up else {key: said[:2] for key, said in job.items()})

    def _respell(self, problems: Sequence[StepsError]) -> None:
        for problem in problems:
            problem.hints = tuple(map(self.respell, problem.hints))

    def request(self, asked: RunRequest) -> Request:
        """The resolver's form of a request: a pipeline's stages, or steps to be chained."""
        from nemotron_steps.resolver.request import request_for_steps

        pipeline = self._pipeline(asked)
        if pipeline is not None:
            from nemotron_steps.session.pipelines import pipeline_request

            return pipeline_request(asked, pipeline, self._has_key)
        if asked.ignore_checks:
            raise UsageError("--ignore-checks names stages of a pipeline", found=" ".join(asked.targets))
        if asked.first is not None or asked.until is not None:
            raise UsageError("--from and --until name stages of a pipeline", found=" ".join(asked.targets))
        if asked.over:
            from nemotron_steps.session.pipelines import fanned_out_step

            return fanned_out_step(asked, self._passthrough(asked) if asked.passthrough else None)
        own = [list[str]() for _ in asked.targets]
        for text in asked.overrides:
            position, override = _addressee(text, asked.targets)
            own[position].append(override)
        if asked.passthrough:
            own[-1].append(self._passthrough(asked))
        request = request_for_steps(asked.targets, config_name=asked.config, inputs=dict(asked.inputs))
        if len(request.goals) == 1:
            return replace(request, goals=(replace(request.goals[0], overrides=tuple(own[0])),))
        goals = tuple(
            replace(self._with_config(goal, is_last=goal is request.goals[-1]), overrides=tuple(overrides))
            for goal, overrides in zip(request.goals, own, strict=True)
        )
        return replace(request, goals=goals)

    def compose(self, step_id: str, config_name: str | None, overrides: Sequence[str]) -> StepConfig:
        """The resolver's Compose: one step's config, composed and validated, with the model's defaults filled in."""
        from nemotron_steps.config.compose import compose
        from nemotron_steps.resolver.request import StepConfig

        key = (step_id, config_name, tuple(overrides))
        if key in self._composed:
            return self._composed[key]
        manifest = self.registry.step(step_id)
        search = self._search_path(manifest)
        reference = manifest.step.config_schema
        if reference is None:
            try:
                composed = compose(config_name, overrides, search=search)
                config = StepConfig(
                    composed.values, composed.inputs, None, composed.origin, composed.variables, job=composed.job
                )
            except ConfigError as error:
                # Written for another tool, with resolvers and defaults of its own: its ports can still be checked.
                if manifest.step.entry is not None:
                    raise
                config = StepConfig({}, unread=error.what)
        else:
            from nemotron_steps.config.validation import complete, has_key, load_schema

            schema = load_schema(reference)
            composed = compose(config_name, overrides, search=search, schema=schema)
            bound = frozenset(key for port in manifest.consumes for key in port.bindings)
            values = complete(composed, schema, bound)
            config = StepConfig(
                values,
                composed.inputs,
                lambda dotted: has_key(schema, dotted),
                composed.origin,
                composed.variables,
                _idle_variables(search, composed),
                job=composed.job,
            )
        self._composed[key] = config
        return config

    def describe_input(self, ref: str, wanted_type: str) -> SuppliedInput:
        """The resolver's DescribeInput: a path, an artifact of the home, or the name of a hub model.

        Raises:
            ArtifactError: there is no such thing, or nothing of its contents says what it is.
        """
        from nemotron_steps.resolver.plan import SuppliedInput
        from nemotron_steps.resolver.problems import AbsentInput

        path = Path(ref).expanduser()
        if path.exists():
            return self._describe_path(path, ref, wanted_type)
        if not ref.startswith((".", "/", "~")):
            try:
                artifact = self.store.find(ref)
                return SuppliedInput(ref, artifact.type, artifact.attributes)
            except (UnknownNameError, ArtifactError) as error:
                if _HUB_NAME.fullmatch(ref) and self._is_checkpoint(wanted_type):
                    is_hf = self.registry.types.is_a(wanted_type, "checkpoint_hf")
                    return SuppliedInput(ref, None if is_hf else "checkpoint_hf")
                hints = error.hints
        else:
            hints = ()
        raise AbsentInput(
            f"'{ref}' is neither a path nor an artifact of this home",
            expected=f"PATH, NAME, NAME:VERSION or a digest of a {wanted_type}",
            found=ref,
            hints=(*_file_meant(ref, path), *(hints or ("steps artifacts list",))),
        )

    def newest(self, step_id: str, config_name: str | None, port: str) -> str | None:
        """The resolver's Newest."""
        from nemotron_steps.runs.step_workdir import artifact_name

        for artifact in reversed(self.store.list_artifacts(name=artifact_name(step_id, port))):
            made_by = artifact.producer
            if made_by is not None and made_by.step == step_id and config_name in (None, made_by.config):
                return artifact.ref
        return None

    def _describe_path(self, path: Path, ref: str, wanted_type: str) -> SuppliedInput:
        from nemotron_steps.artifacts.checkpoints import has_weights, validate_model_folder
        from nemotron_steps.artifacts.prompt_data import first_row, looks_like
        from nemotron_steps.artifacts.validators import has_validator, sniff_type, validate
        from nemotron_steps.resolver.foreign_data import FOREIGN, holds_no_rows, refusal, unknown_rows
        from nemotron_steps.resolver.plan import SuppliedInput
        from nemotron_steps.resolver.problems import AbsentInput

        types = self.registry.types
        ancestors = types.ancestors(wanted_type)
        # Only built-in types are recognised by their content; for any other the user's word counts.
        if not any(has_validator(name) for name in ancestors):
            return SuppliedInput(ref, wanted_type)
        found = sniff_type(path)
        foreign = next((kind for kind, ours in FOREIGN.items() if wanted_type in (kind, ours)), None)
        fits = found is not None and types.is_a(found, FOREIGN.get(foreign or "", wanted_type))
        if foreign is not None and not fits and looks_like(foreign, path):
            return SuppliedInput(ref, foreign, _at_a_glance(path) if foreign == "prompt_data" else {})
        # Rows are read and checked when the step opens them; anything else is cheap to look at now.
        if types.is_a(wanted_type, "training_jsonl") and (found is None or holds_no_rows(path)):
            raise refusal(path, ref, wanted_type, self.registry)
        if foreign is not None and found == "training_jsonl":
            raise unknown_rows(ref, wanted_type, first_row(path) or {})
        type_name = found or wanted_type
        if path.is_file() and type_name.startswith("checkpoint"):
            raise ArtifactError(f"'{ref}' is a file, not {wanted_type}", expected="the folder of a checkpoint")
        if found is not None and not type_name.startswith("checkpoint"):
            return SuppliedInput(ref, type_name, _at_a_glance(path) if type_name == "rl_prompts" else {})
        nested = path / "hf"  # of a Megatron checkpoint
        model = str(nested if nested.is_dir() else path) if self._is_checkpoint(type_name) else None
        try:
            return SuppliedInput(ref, type_name, validate(type_name, path, types.ancestors(type_name)), folder=model)
        except ArtifactError as error:
            if type_name != "checkpoint_hf" or has_weights(path):
                raise
            absent = AbsentInput(
                error.what,
                where=error.where,
                expected=error.expected,
                found=error.found,
                hints=(f"hf download MODEL --local-dir {shlex.quote(str(path))}   # its weights as well",),
            )
            return SuppliedInput(ref, type_name, validate_model_folder(path), absent=absent, folder=model)

    def profile(self, name: str | None, job: Mapping[str, Sequence[Any]] | None = None) -> Profile | None:
        """An env.toml profile by name, as its executor reads it; None for no name, and in a job. `job`: as `job_of`."""
        if name is None or self.in_job:
            return None
        from nemotron_steps.config.profiles import load_environment
        from nemotron_steps.runs.executors.base import profile_model

        return load_environment().profile(name, profile_model, job)

    def profile_of(self, asked: RunRequest, *, allow_unfilled: bool = False) -> Profile | None:
        """A request's profile; one that cannot be read is told with everything else that is wrong with the request.

        Args:
            allow_unfilled: see `plan`.
        """
        try:
            return self.profile(asked.profile)
        except StepsError:
            self.plan(asked, allow_unfilled=allow_unfilled)
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

    def _with_config(self, goal: Goal, *, is_last: bool) -> Goal:
        """A step of a list with its share of `-c`: a file is for the last step, a name for all that have configs."""
        from nemotron_steps.config.search import is_path

        manifest = self.registry.find_step(goal.step_id)
        if goal.config_name is None or manifest is None:
            return goal
        keeps = is_last if is_path(goal.config_name) else bool(manifest.config_names)
        return goal if keeps else replace(goal, config_name=None)

    def _search_path(self, manifest: StepManifest) -> SearchPath:
        """Where a step's configs and their bases are: its own pack, then the others in their order."""
        from nemotron_steps.config.search import SearchPath

        packs = sorted(self.registry.packs, key=lambda pack: pack.name != manifest.pack)
        alike = [step for step in self.registry.hidden_steps.values() if step.step.id == manifest.step.id]
        if alike:
            alike.append(self.registry.step(manifest.step.id))
        rivals = {step.pack for step in alike} - {manifest.pack}
        return SearchPath(
            manifest.step.id,
            tuple(pack.configs for pack in packs if pack.configs is not None),
            manifest.config_dir,
            frozenset(pack.configs for pack in packs if pack.configs is not None and pack.name in rivals),
        )

    def _is_checkpoint(self, type_name: str) -> bool:
        return any(ancestor.startswith("checkpoint") for ancestor in self.registry.types.ancestors(type_name))

    def _has_key(self, step_id: str, key: str) -> bool:
        """Whether a step's config has a key; not, where the step has no config model."""
        from nemotron_steps.config.validation import has_key, load_schema

        schema = self.registry.step(step_id).step.config_schema
        return schema is not None and has_key(load_schema(schema), key)

    def _passthrough(self, asked: RunRequest) -> str:
        """The override that hands what stands after `--` to the last step. UsageError if it takes none."""
        last = asked.targets[-1]
        schema = self.registry.step(last).step.config_schema
        takes = False
        if schema is not None:
            from nemotron_steps.config.validation import has_key, load_schema

            takes = has_key(load_schema(schema), PASSTHROUGH_KEY)
        if not takes:
            raise UsageError(
                f"step '{last}' takes nothing after `--`: its config has no key '{PASSTHROUGH_KEY}'",
                found=" ".join(asked.passthrough),
                hints=(f"steps show {last}",),
            )
        quoted = ("'" + word.replace("\\", "\\\\").replace("'", "\\'") + "'" for word in asked.passthrough)
        return f"{PASSTHROUGH_KEY}=[{','.join(quoted)}]"

    def _pipeline(self, asked: RunRequest) -> PipelineManifest | None:
        """The pipeline a request names: by name, or by the path of its file."""
        find = self.registry.find_pipeline
        named = [target for target in asked.targets if target.endswith(".toml") or find(target) is not None]
        if not named:
            if len(asked.targets) == 1 and asked.targets[0] in self.registry.broken:
                raise self.registry.broken[asked.targets[0]]
            return None
        if len(asked.targets) > 1:
            raise UsageError(f"'{named[0]}' is a pipeline, and a pipeline is run alone", found=" ".join(asked.targets))
        if find(named[0]) is not None:
            return self.registry.pipeline(named[0])
        from nemotron_steps.manifest.registry import load_pipeline_file

        file = Path(named[0]).expanduser()
        if not file.is_file():
            raise RequestError("no such pipeline file", where=named[0], hints=("steps list",))
        return load_pipeline_file(file)


def _at_a_glance(path: Path) -> dict[str, Any]:
    """Attributes of prompts that their first rows tell: who speaks in them, and that they name nobody who grades."""
    from nemotron_steps.artifacts.prompt_data import names_no_agent, roles_in

    roles = roles_in(path)
    return {
        **({"roles": list(roles)} if roles else {}),
        **({"environments": []} if names_no_agent(path) else {}),
    }


def _idle_variables(search: SearchPath, composed: ComposedConfig) -> tuple[tuple[str, str], ...]:
    """Environment variables that are set and that another config of the step reads, and which config that is."""
    from nemotron_steps.config.compose import variables_in

    def read(files: Iterable[Path]) -> set[str]:
        return {name for file in files for name in variables_in(file.read_text(encoding="utf-8", errors="replace"))}

    every = ((config, read(search.with_bases(file))) for config, file in reversed(search.files().items()))
    found = {name: config for config, names in every for name in names if os.environ.get(name)}
    here = read(composed.files) if found else set()
    return tuple((name, config) for name, config in sorted(found.items()) if name not in here)


def _addressee(override: str, targets: Sequence[str]) -> tuple[int, str]:
    """Which step of a list an override is for: the one it names (`STEP.key=value`), else the last."""
    prefix, key = override[: len(override) - len(override.lstrip("+~"))], override.lstrip("+~")
    for position, target in enumerate(targets):
        if len(targets) > 1 and key.startswith(f"{target}."):
            return position, prefix + key[len(target) + 1 :]
    return len(targets) - 1, override


def _file_meant(ref: str, path: Path) -> tuple[str, ...]:
    """The hint of a file or folder beside `path` that has nearly its name."""
    from difflib import get_close_matches

    names = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
    close = get_close_matches(path.name, names, n=1, cutoff=0.75)
    return did_you_mean([ref.removesuffix(path.name) + name for name in close])
