"""Every step, type and pipeline of every pack, checked together. One broken file never hides the others.

Where several packs have a step (or pipeline) of one id, the plain id is the first pack's, in the order in which packs
are found. Every step is also `PACK:ID`, the hidden ones only that (docs/decisions/one-id-in-several-packs.md).
"""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from nemotron_steps.config.names import by_alias, meant, nearest
from nemotron_steps.errors import ManifestError, UnknownNameError, did_you_mean, renamed_key
from nemotron_steps.manifest import loader
from nemotron_steps.manifest.models import StepManifest, TypeManifest
from nemotron_steps.manifest.packs import BUILT_IN, TYPES_FILE, Pack, PackSearch, find_packs
from nemotron_steps.manifest.pipeline_models import PipelineManifest
from nemotron_steps.manifest.typegraph import ArtifactType, Conversion, TypeGraph, find_cycle

M = TypeVar("M", StepManifest, PipelineManifest)


@dataclass(frozen=True)
class Registry:
    """All manifests, by id or name. What is broken is not among them: asking for it raises why."""

    steps: Mapping[str, StepManifest]
    pipelines: Mapping[str, PipelineManifest]
    types: TypeGraph
    """Without the conversions whose step is missing or unusable."""
    packs: tuple[Pack, ...] = ()
    problems: tuple[ManifestError, ...] = ()
    warnings: tuple[ManifestError, ...] = ()
    """Remarks on what did load."""
    broken: Mapping[str, ManifestError] = field(default_factory=dict)
    """Step id or pipeline name, plain (unless another pack has one) and as `PACK:ID` → the mistake that removed it."""
    hidden_steps: Mapping[str, StepManifest] = field(default_factory=dict)
    """`PACK:ID` → what an earlier pack's of the same id hides."""
    hidden_pipelines: Mapping[str, PipelineManifest] = field(default_factory=dict)

    def step_id(self, name: str) -> str:
        """The id of the step that has `name` among its aliases, where nothing else goes by it; else `name`."""
        if name in self.broken or _find(name, self.steps, self.hidden_steps) or self.find_pipeline(name):
            return name
        return by_alias(name, {each.id: each.step.aliases for each in self.steps.values()}) or name

    def find_step(self, step_id: str) -> StepManifest | None:
        """The manifest of a step by `ID`, `PACK:ID` or alias; None if there is none that loads."""
        return _find(self.step_id(step_id), self.steps, self.hidden_steps)

    def find_pipeline(self, name: str) -> PipelineManifest | None:
        """A pipeline by `NAME` or `PACK:NAME`; None if there is none that loads."""
        return _find(name, self.pipelines, self.hidden_pipelines)

    def hidden_by(self, manifest: StepManifest) -> tuple[str, ...]:
        """`PACK:ID` of the steps that share a step's plain id and are hidden by it, in the order of their packs."""
        shared = (other for other in self.hidden_steps.values() if other.step.id == manifest.id)
        return tuple(other.id for other in shared)

    def step(self, step_id: str) -> StepManifest:
        """The manifest of a step by `ID`, `PACK:ID` or alias, or the error that says why there is none."""
        found = self.find_step(step_id)
        if found is None:
            expected = "an id that `steps list` shows; an override is KEY=VALUE in one word"
            raise self._missing("step", step_id, [*self.steps, *self.hidden_steps], expected, "steps list")
        return found

    def pipeline(self, name: str) -> PipelineManifest:
        """A pipeline by name, or the error that says why there is none."""
        found = self.find_pipeline(name)
        if found is None:
            known = f"one of {', '.join(sorted(self.pipelines)) or 'none are installed'}"
            raise self._missing("pipeline", name, self.pipelines, f"{known}, or a path to a .toml file")
        return found

    def type(self, name: str) -> ArtifactType:
        """A declared type, or the error that names the nearest."""
        if name not in self.types:
            expected = "a name that `steps types` shows"
            raise self._missing("artifact type", name, self.types.types, expected, "steps types")
        return self.types.types[name]

    def _missing(
        self, kind: str, name: str, known: Iterable[str], expected: str, *hints: str
    ) -> ManifestError | UnknownNameError:
        if kind != "artifact type" and name in self.broken:
            return self.broken[name]
        near = did_you_mean(nearest(name, known))
        return UnknownNameError(f"there is no {kind} '{name}'", expected=expected, hints=(*near, *hints))


def load_registry(search: PackSearch | None = None) -> Registry:
    """Read every pack (default: `find_packs()`) and check that the parts fit together."""
    found = find_packs() if search is None else search
    reading = _Reading()
    reading.problems.extend(found.problems)
    for pack in found.packs:
        reading.read_pack(pack)
    return reading.registry(found.packs)


def load_pipeline_file(path: Path) -> PipelineManifest:
    """A pipeline from a file outside any pack. Raises ManifestError; further mistakes follow as notes."""
    pipeline, problems = loader.parse_pipeline(loader.read_toml(path))
    if pipeline is None:
        first, *others = problems
        raise ManifestError(
            first.what,
            where=first.where,
            expected=first.expected,
            found=first.found,
            hints=(*first.hints, *(f"also at {p.where}: {p.what}" for p in others)),
        )
    return pipeline


def _find(name: str, plain: Mapping[str, M], hidden: Mapping[str, M]) -> M | None:
    """By plain id, by `PACK:ID` of a hidden one, or by `PACK:ID` of the one that the plain id is."""
    found = plain.get(name) or hidden.get(name)
    pack, colon, rest = name.partition(":")
    if found is None and colon and rest in plain and plain[rest].pack == pack:
        return plain[rest]
    return found


def _id_in(text: str) -> str:
    """The id that a file which does not parse has in its text, to say why that step is missing; "" for none."""
    match = re.search(r'^\s*id\s*=\s*"([^"]+)"', text, re.M)
    return match[1] if match else ""


@dataclass
class _Reading:
    """State while packs are read: what loaded so far, and what went wrong."""

    steps: dict[str, list[StepManifest]] = field(default_factory=dict)
    """Id → the manifests that have it, in the order of their packs."""
    pipelines: dict[str, list[PipelineManifest]] = field(default_factory=dict)
    types: dict[str, list[tuple[TypeManifest, loader.TomlFile]]] = field(default_factory=dict)
    problems: list[ManifestError] = field(default_factory=list)
    warnings: list[ManifestError] = field(default_factory=list)
    broken: dict[tuple[str, str], ManifestError] = field(default_factory=dict)
    """(pack, id) → the mistake that removed it."""
    parents: dict[tuple[str, str], int] = field(default_factory=dict)
    """(type, parent) → how many packs were read when it was first said."""
    packs_read: int = 0

    def problem(self, what: str, **said: Any) -> None:
        self.problems.append(ManifestError(what, **said))

    def warn(self, what: str, **said: Any) -> None:
        self.warnings.append(ManifestError(what, **said))

    def read_pack(self, pack: Pack) -> None:
        self.packs_read += 1
        manifests = 0
        for path in pack.files():
            try:
                manifests += self.read_file(pack, path)
            except ManifestError as error:
                if pack.strict or path.name in ("step.toml", TYPES_FILE):
                    self.problems.append(error)
                    manifests += 1
                    start = b""
                    if path.is_file():
                        with path.open("rb") as file:
                            start = file.read(1 << 16)
                    if step_id := _id_in(start.decode("utf-8", "replace")):
                        self.broken.setdefault((pack.name, step_id), error)
        for path, right in pack.unseen() if pack.name != BUILT_IN else ():
            move = f"mv {shlex.quote(str(path))} {shlex.quote(str(right))}"
            self.problem(
                f"'{path.name}' of pack '{pack.name}' is read by nothing",
                where=str(path),
                expected=str(right),
                hints=(f"mkdir -p {shlex.quote(str(right.parent))} && {move}",),
            )
        if not manifests:
            expected = "step.toml files, or a manifests folder"
            self.problem(f"pack '{pack.name}' holds no manifest", where=str(pack.base), expected=expected)

    def read_file(self, pack: Pack, path: Path) -> bool:
        """Read one file; whether it is a manifest at all. Raises ManifestError when it is not even TOML."""
        file = loader.read_toml(path)
        if path.name == TYPES_FILE:
            types, problems = loader.parse_types(file)
            self.problems.extend(problems)
            for name, parsed in types.items():
                self.types.setdefault(name, []).append((parsed, file))
                for parent in parsed.is_a:
                    self.parents.setdefault((name, parent), self.packs_read)
        elif "step" in file.data:
            self.read_step(pack, file)
        elif "pipeline" in file.data or "stages" in file.data:
            self.read_pipeline(pack, file)
        elif pack.strict or path.name == "step.toml":
            self.problem("the file is not a manifest", where=f"{path}:1", expected="a [step] or a [pipeline] table")
        else:
            return False
        return True

    def read_step(self, pack: Pack, file: loader.TomlFile) -> None:
        table = file.data["step"]
        step_id = table.get("id") if isinstance(table, dict) else None
        if not isinstance(step_id, str):
            step_id = None
        config_dir = None if step_id is None else pack.config_dir(file.path, step_id)
        step, problems = loader.parse_step(file, pack=pack.name, config_dir=config_dir)
        if step is None:
            self.problems.extend(problems)
            if name := step_id or _id_in(file.source.text):
                self.broken.setdefault((pack.name, name), problems[0])
            return
        if not step.produces and not step.consumes:
            self.warn(f"step '{step.id}' neither consumes nor produces anything", where=step.where("step"))
        self.add(step, "step", pack, file, self.steps.setdefault(step.id, []))

    def read_pipeline(self, pack: Pack, file: loader.TomlFile) -> None:
        pipeline, problems = loader.parse_pipeline(file, pack=pack.name)
        if pipeline is not None:
            self.add(pipeline, "pipeline", pack, file, self.pipelines.setdefault(pipeline.name, []))
            return
        table = file.data.get("pipeline")
        name = table.get("name") if isinstance(table, dict) else None
        self.problems.extend(problems)
        self.broken.setdefault((pack.name, name if isinstance(name, str) else file.path.stem), problems[0])

    def add(self, new: M, kind: str, pack: Pack, file: loader.TomlFile, there: list[M]) -> None:
        """Keep a manifest beside those of the same id. Copies with the same content are one manifest.

        Two of one id within a pack are a mistake, and neither is used: nothing could tell them apart."""
        if any(first.source is not None and first.source.text == file.source.text for first in there):
            return
        key = ("step", "id") if kind == "step" else ("pipeline", "name")
        for first in there:
            if first.pack == pack.name:
                name = new.step.id if isinstance(new, StepManifest) else new.name
                error = ManifestError(
                    f"two files of pack '{pack.name}' define {kind} '{name}'",
                    where=f"{first.where(*key)} and {file.where(*key)}",
                    expected="one file per id",
                    hints=(f"rename or remove {file.path}", f"rename or remove {first.file}"),
                )
                self.problems.append(error)
                self.broken.setdefault((pack.name, name), error)
        there.append(new)

    def usable(self, manifests: dict[str, list[M]], kind: str) -> tuple[dict[str, M], dict[str, M]]:
        """Those that go by their plain id, and those of later packs under `PACK:ID`, each with a warning."""
        plain: dict[str, M] = {}
        hidden: dict[str, M] = {}
        for name in sorted(manifests):
            usable = [each for each in manifests[name] if (each.pack, name) not in self.broken]
            for first in usable[:1]:
                plain[name] = first
            for other in usable[1:]:
                hidden[f"{other.pack}:{name}"] = other.model_copy(update={"hidden": True})
                self.warn(
                    f"{kind} '{name}' of pack '{other.pack}' is hidden by that of pack '{usable[0].pack}'",
                    where=other.where(*(("step", "id") if kind == "step" else ("pipeline", "name"))),
                    hints=(f"steps plan {other.pack}:{name}   # is the hidden one",),
                )
        return plain, hidden

    def registry(self, packs: tuple[Pack, ...]) -> Registry:
        graph = self.type_graph()
        for step in [each for alike in self.steps.values() for each in alike]:
            self.check_types(graph, step)
        steps, hidden_steps = self.usable(self.steps, "step")
        pipelines, hidden_pipelines = self.usable(self.pipelines, "pipeline")
        for name in [name for name in pipelines if name in steps]:
            taken = pipelines.pop(name)
            hidden_pipelines[f"{taken.pack}:{name}"] = taken.model_copy(update={"hidden": True})
            text = f"pipeline '{name}' of pack '{taken.pack}' is hidden by the step of that id"
            self.warn(text, where=taken.where("pipeline", "name"))
        known = {**steps, **hidden_steps}
        graph = graph.without(self.unusable_conversions(graph, known))
        for pack in packs:
            self.check_folders(pack, known)
        for pipeline in (*pipelines.values(), *hidden_pipelines.values()):
            if pipeline.pack != BUILT_IN:
                self.check_names(pipeline, known, packs)
        broken = {f"{pack}:{name}": error for (pack, name), error in self.broken.items()}
        for (_, name), error in self.broken.items():
            if name not in steps and name not in pipelines:
                broken.setdefault(name, error)
        return Registry(
            steps,
            pipelines,
            graph,
            packs,
            tuple(self.problems),
            tuple(self.warnings),
            broken,
            hidden_steps,
            hidden_pipelines,
        )

    def type_graph(self) -> TypeGraph:
        """Merge the definitions of each type: packs may add to a type of an earlier pack, not change what it says."""
        merged: dict[str, ArtifactType] = {}
        for name, definitions in self.types.items():
            convert: dict[str, str] | None = None
            parents: list[str] = []
            attributes: dict[str, str] = {}
            for parsed, file in definitions:
                parents += [parent for parent in parsed.is_a if parent not in parents]
                attributes = {**parsed.attributes, **attributes}
                if parsed.convert_to is None:
                    continue
                convert = {} if convert is None else convert
                for target, step_id in parsed.convert_to.items():
                    if convert.setdefault(target, step_id) != step_id:
                        self.warn(
                            f"type '{name}' is converted to '{target}' by the step an earlier pack names",
                            where=file.where(name, "convert_to", target),
                            expected=convert[target],
                            found=step_id,
                        )
            description = next((d.description for d, _ in definitions if d.description), "")
            where = definitions[0][1].where(name)
            validator = next((d.validator for d, _ in definitions if d.validator), None)
            merged[name] = ArtifactType(name, description, tuple(parents), convert, attributes, validator, where)
        return TypeGraph(self.without_bad_parents(merged).values())

    def without_bad_parents(self, merged: dict[str, ArtifactType]) -> dict[str, ArtifactType]:
        """Report unknown parents and is_a cycles, and drop those edges so that the rest can be used."""
        dropped: set[tuple[str, str]] = set()
        for name, parent in [(name, parent) for name, each in merged.items() for parent in each.is_a]:
            if parent not in merged:
                dropped.add((name, parent))
                self.problem(
                    f"type '{name}' is_a '{parent}', which is not a type",
                    where=self.types[name][0][1].where(name, "is_a"),
                    hints=did_you_mean(nearest(parent, merged)[:1]),
                )
        parents = {n: [p for p in t.is_a if (n, p) not in dropped] for n, t in merged.items()}
        while cycle := find_cycle(parents):
            self.problem(
                f"is_a goes in a circle: {' → '.join(cycle)}",
                where=self.types[cycle[0]][0][1].where(cycle[0], "is_a"),
                expected="a type is never its own ancestor",
            )
            # What the latest pack said goes, so that no pack can loosen what the ones before it rely on.
            child, parent = max(pairwise(cycle), key=lambda edge: (self.parents[edge], cycle.index(edge[0])))
            parents[child] = [p for p in parents[child] if p != parent]
        return {name: replace(t, is_a=tuple(parents[name])) for name, t in merged.items()}

    def unusable_conversions(self, graph: TypeGraph, steps: Mapping[str, StepManifest]) -> list[Conversion]:
        """Conversions whose step is not there or does not do what the type says; each is a warning."""
        gone = []
        named = [(each.name, *named) for each in graph.types.values() for named in (each.convert_to or {}).items()]
        for name, target, step_id in named:
            step = steps.get(step_id)
            required = [port for port in step.consumes if port.required] if step is not None else []
            if step is None:
                why = f"there is no step '{step_id}'"
            elif len(required) != 1:
                why = f"step '{step_id}' needs {len(required)} inputs, not one"
            elif not graph.is_a(name, required[0].type):
                why = f"step '{step_id}' takes '{required[0].type}'"
            elif not any(graph.is_a(port.type, target) for port in step.produces):
                why = f"step '{step_id}' produces no '{target}'"
            else:
                continue
            gone.append(Conversion(name, target, step_id))
            where = self.types[name][0][1].where(name, "convert_to", target)
            self.warn(f"'{name}' is never converted to '{target}' by itself: {why}", where=where)
        return gone

    def check_types(self, graph: TypeGraph, step: StepManifest) -> None:
        """Types that a step uses and nobody declares relate to no other type: a mistake of a step that can be run, and
        a remark on one that can be planned only."""
        used: list[tuple[str, int, str, str]] = []
        for index, port in enumerate(step.consumes):
            used.append(("consumes", index, "type", port.type))
            used += [("consumes", index, "auto", port.auto)] if isinstance(port.auto, str) else []
        for index, output in enumerate(step.produces):
            used += [("produces", index, "type", kind) for kind in (output.type, *output.becomes.values())]
        for table, index, key, name in used:
            if name not in graph:
                where = step.where(table, index, key)
                error = ManifestError(
                    f"type '{name}' is not declared in any {TYPES_FILE}",
                    where=where,
                    expected=f"a type that `steps types` shows, or a table [{name}] in {TYPES_FILE} of the pack",
                    hints=renamed_key(where, name, *meant(name, graph.types, 1))
                    or did_you_mean(nearest(name, graph.types, 1)),
                )
                if step.step.entry is None:
                    self.warnings.append(error)
                else:
                    self.problems.append(error)
                    self.broken.setdefault((step.pack, step.step.id), error)

    def check_folders(self, pack: Pack, steps: Mapping[str, StepManifest]) -> None:
        """Folders of configs whose step there is not, and that are named nearly as one there is."""
        if pack.configs is None or pack.name == BUILT_IN:
            return
        ids = {step.step.id for step in steps.values()}
        folders = {file.parent for file in pack.configs.rglob("*.yaml")}
        for folder in sorted(folders):
            name = folder.relative_to(pack.configs).as_posix()
            close = meant(name, ids, 1) if name not in ids else ()
            if close and not (pack.configs / close[0]).is_dir():
                self.problem(
                    f"there is no step '{name}', so nothing reads its configs",
                    where=str(folder),
                    expected=f"configs/{close[0]}",
                    hints=(shlex.join(["mv", str(folder), str(pack.configs / close[0])]),),
                )

    def check_names(self, pipeline: PipelineManifest, steps: Mapping[str, StepManifest], packs: Sequence[Pack]) -> None:
        """Steps, configs and ports that a pipeline names and that there are not."""
        outputs: dict[str, Sequence[str]] = {}

        def check(what: str, name: str, known: Iterable[str], *place: str | int) -> None:
            known = sorted(known)
            if name in known:
                return
            where = pipeline.where(*place)
            right = meant(name, known, 1)
            self.problem(
                f"pipeline '{pipeline.name}' names {what} '{name}', which there is not",
                where=where,
                expected=", ".join(known) if len(known) <= 12 else f"one of {len(known)}",
                hints=renamed_key(where, name, *right) or did_you_mean(right),
            )

        for number, stage in enumerate(pipeline.stages):
            place = ("stages", number)
            step = steps.get(stage.step) or steps.get(stage.step.rpartition(":")[2])
            if step is None:
                check("the step", stage.step, steps, *place, "step")
                continue
            outputs[stage.name] = list(step.outputs)
            folders = [pack.configs / step.step.id for pack in packs if pack.configs]
            configs = {file.stem for folder in folders for file in folder.glob("*.yaml")}
            if stage.config is not None and not re.search(r"[/.]", stage.config):
                check("the config", stage.config, {*configs, *step.config_names}, *place, "config")
            for port, source in stage.inputs.items():
                base = port.partition(".")[0]
                check(f"an input of {step.id},", base, step.inputs, *place, "inputs", base)
                if source.port is not None and source.stage in outputs:
                    what = f"an output of stage {source.stage},"
                    check(what, source.port, outputs[source.stage], *place, "inputs", base)
