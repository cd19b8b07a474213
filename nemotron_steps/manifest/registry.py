"""Every step, type and pipeline of every pack, checked together. One broken file never hides the others.

Where several packs have a step (or pipeline) of one id, the plain id is the first pack's, in the order in which packs
are found. Every step is also `PACK:ID`, the hidden ones only that (docs/decisions/one-id-in-several-packs.md).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from nemotron_steps.config.names import by_alias, meant, nearest
from nemotron_steps.errors import ManifestError, UnknownNameError, did_you_mean, renamed_key
from nemotron_steps.manifest import loader
from nemotron_steps.manifest.models import StepManifest, TypeManifest
from nemotron_steps.manifest.packs import TYPES_FILE, Pack, PackSearch, find_packs
from nemotron_steps.manifest.pipeline_models import PipelineManifest
from nemotron_steps.manifest.typegraph import ArtifactType, Conversion, TypeGraph

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
        return tuple(other.id for other in self.hidden_steps.values() if other.step.id == manifest.id)

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
        problems[0].hints += tuple(f"also at {each.where}: {each.what}" for each in problems[1:])
        raise problems[0]
    return pipeline


def _find(name: str, plain: Mapping[str, M], hidden: Mapping[str, M]) -> M | None:
    """By plain id, by `PACK:ID` of a hidden one, or by `PACK:ID` of the one that the plain id is."""
    found = plain.get(name) or hidden.get(name)
    pack, colon, rest = name.partition(":")
    if found is None and colon and rest in plain and plain[rest].pack == pack:
        return plain[rest]
    return found


def _id_in(path: Path) -> str:
    """The id that a file which does not parse has in its text, to say why that step is missing; "" for none."""
    if not path.is_file():  # a pipe would be waited for
        return ""
    with path.open(encoding="utf-8", errors="replace") as file:
        match = re.search(r'^\s*id\s*=\s*"([^"]+)"', file.read(1 << 16), re.M)
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
    parents: dict[tuple[str, str], str] = field(default_factory=dict)
    """(type, parent) → where it is first said, in the order of the packs."""

    def problem(self, what: str, **said: Any) -> None:
        self.problems.append(ManifestError(what, **said))

    def warn(self, what: str, **said: Any) -> None:
        self.warnings.append(ManifestError(what, **said))

    def read_pack(self, pack: Pack) -> None:
        manifests = 0
        for path in pack.files():
            try:
                manifests += self.read_file(pack, path)
            except ManifestError as error:
                if pack.strict or path.name in ("step.toml", TYPES_FILE):
                    self.problems.append(error)
                    manifests += 1
                    if step_id := _id_in(path):
                        self.broken.setdefault((pack.name, step_id), error)
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
                    self.parents.setdefault((name, parent), file.where(name, "is_a"))
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
        found = table.get("id") if isinstance(table, dict) else None
        step_id = found if isinstance(found, str) else None
        config_dir = None if step_id is None else pack.config_dir(file.path, step_id)
        step, problems = loader.parse_step(file, pack=pack.name, config_dir=config_dir)
        if step is None:
            self.problems.extend(problems)
            if name := step_id or _id_in(file.path):
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
        key = (kind, "id" if kind == "step" else "name")
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
            for each in manifests[name]:
                if (each.pack, name) in self.broken:
                    continue
                first = plain.setdefault(name, each)
                if first is each:
                    continue
                hidden[f"{each.pack}:{name}"] = each.model_copy(update={"hidden": True})
                self.warn(
                    f"{kind} '{name}' of pack '{each.pack}' is hidden by that of pack '{first.pack}'",
                    where=each.where(kind, "id" if kind == "step" else "name"),
                    hints=(f"steps plan {each.pack}:{name}   # is the hidden one",),
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
        graph = graph.without(self.unusable_conversions(graph, {**steps, **hidden_steps}))
        broken = {f"{pack}:{name}": error for (pack, name), error in self.broken.items()}
        for (_, name), error in self.broken.items():
            if name not in steps and name not in pipelines:
                broken.setdefault(name, error)
        told = tuple(self.problems), tuple(self.warnings)
        return Registry(steps, pipelines, graph, packs, *told, broken, hidden_steps, hidden_pipelines)

    def type_graph(self) -> TypeGraph:
        """Merge the definitions of each type: packs may add to a type of an earlier pack, not change what it says."""
        merged: dict[str, ArtifactType] = {}
        parents = self.usable_parents()
        for name, definitions in self.types.items():
            convert: dict[str, str] | None = None
            attributes: dict[str, str] = {}
            for parsed, file in definitions:
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
            merged[name] = ArtifactType(name, description, parents[name], convert, attributes, validator, where)
        return TypeGraph(merged.values())

    def usable_parents(self) -> dict[str, tuple[str, ...]]:
        """Type → its parents, but those that are no types or below it: of a circle the latest that was said goes, so
        that no pack can loosen what the ones before it rely on."""
        parents: dict[str, tuple[str, ...]] = dict.fromkeys(self.types, ())
        for (name, parent), where in self.parents.items():
            above = [parent]
            for each in above:
                above += [higher for higher in parents.get(each, ()) if higher not in above]
            if parent not in self.types:
                hints = did_you_mean(nearest(parent, self.types)[:1])
                self.problem(f"type '{name}' is_a '{parent}', which is not a type", where=where, hints=hints)
            elif name in above:
                expected = "a type is never its own ancestor"
                self.problem(f"is_a goes in a circle: {name} is above '{parent}'", where=where, expected=expected)
            else:
                parents[name] += (parent,)
        return parents

    def unusable_conversions(self, graph: TypeGraph, steps: Mapping[str, StepManifest]) -> list[Conversion]:
        """Conversions whose step is not there or does not do what the type says; each is a warning."""
        gone = []
        named = [(each.name, *named) for each in graph.types.values() for named in (each.convert_to or {}).items()]
        for name, target, step_id in named:
            step = steps.get(step_id)
            required = [port.type for port in step.consumes if port.required] if step is not None else []
            makes = step is not None and any(graph.is_a(port.type, target) for port in step.produces)
            if makes and len(required) == 1 and graph.is_a(name, required[0]):
                continue
            gone.append(Conversion(name, target, step_id))
            where, why = self.types[name][0][1].where(name, "convert_to", target), f"there is no step '{step_id}'"
            if step is not None:
                why = f"step '{step_id}' does not make it of one '{name}'"
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
