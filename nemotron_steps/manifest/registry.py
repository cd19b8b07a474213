"""Every step, type and pipeline of every pack, checked together. One broken file never hides the others.

`load_registry` never raises for what it finds in packs: mistakes are collected in `problems`, and asking for a step
that a mistake removed raises that mistake.

Where several packs have a step (or pipeline) of one id, the plain id is the first pack's, in the order in which packs
are found: built-in, installed, STEPS_PATH, working directory. Every step is also `PACK:ID`, the hidden ones only that
(docs/decisions/one-id-in-several-packs.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from nemotron_steps.config.names import nearest
from nemotron_steps.errors import ManifestError, UnknownNameError, did_you_mean
from nemotron_steps.manifest import loader
from nemotron_steps.manifest.models import StepManifest, TypeManifest
from nemotron_steps.manifest.packs import Pack, PackSearch, find_packs
from nemotron_steps.manifest.pipeline_models import PipelineManifest
from nemotron_steps.manifest.typegraph import ArtifactType, Conversion, TypeGraph, find_cycles

TYPES_FILE = "types.toml"

M = TypeVar("M", StepManifest, PipelineManifest)


@dataclass(frozen=True)
class Registry:
    """All manifests.

    Attributes:
        steps: id → manifest.
        pipelines: name → pipeline.
        hidden_steps, hidden_pipelines: `PACK:ID` → what an earlier pack's of the same id hides.
        types: the type graph; conversions whose step is missing or unusable are already left out.
        packs: where everything came from.
        problems: mistakes; what they are about is not in `steps`, `pipelines` or `types`.
        warnings: remarks on what did load.
    """

    steps: Mapping[str, StepManifest]
    pipelines: Mapping[str, PipelineManifest]
    types: TypeGraph
    packs: tuple[Pack, ...] = ()
    problems: tuple[ManifestError, ...] = ()
    warnings: tuple[ManifestError, ...] = ()
    broken: Mapping[str, ManifestError] = field(default_factory=dict)
    """Step id or pipeline name, plain (unless another pack has one) and as `PACK:ID` → the mistake that removed it."""
    hidden_steps: Mapping[str, StepManifest] = field(default_factory=dict)
    hidden_pipelines: Mapping[str, PipelineManifest] = field(default_factory=dict)

    def find_step(self, step_id: str) -> StepManifest | None:
        """The manifest of a step by `ID` or `PACK:ID`; None if there is none that loads."""
        return _find(step_id, self.steps, self.hidden_steps)

    def find_pipeline(self, name: str) -> PipelineManifest | None:
        """A pipeline by `NAME` or `PACK:NAME`; None if there is none that loads."""
        return _find(name, self.pipelines, self.hidden_pipelines)

    def hidden_by(self, manifest: StepManifest) -> tuple[str, ...]:
        """`PACK:ID` of the steps that share a step's plain id and are hidden by it, in the order of their packs."""
        shared = (other for other in self.hidden_steps.values() if other.step.id == manifest.id)
        return tuple(other.id for other in shared)

    def step(self, step_id: str) -> StepManifest:
        """The manifest of a step by `ID` or `PACK:ID`.

        Raises UnknownNameError with the nearest ids, or the ManifestError that broke it.
        """
        found = self.find_step(step_id)
        if found is not None:
            return found
        if step_id in self.broken:
            raise self.broken[step_id]
        close = nearest(step_id, [*self.steps, *self.hidden_steps])
        raise UnknownNameError(
            f"there is no step '{step_id}'",
            expected="an id that `steps list` shows; an override is KEY=VALUE in one word",
            hints=(*did_you_mean(close), "steps list"),
        )

    def pipeline(self, name: str) -> PipelineManifest:
        """A pipeline by name. Raises UnknownNameError with the nearest names, or the ManifestError that broke it."""
        found = self.find_pipeline(name)
        if found is not None:
            return found
        if name in self.broken:
            raise self.broken[name]
        close = nearest(name, self.pipelines)
        raise UnknownNameError(
            f"there is no pipeline '{name}'",
            expected=f"one of {', '.join(sorted(self.pipelines)) or 'none are installed'}, or a path to a .toml file",
            hints=did_you_mean(close),
        )

    def type(self, name: str) -> ArtifactType:
        """A declared type. Raises UnknownNameError with the nearest names."""
        found = self.types.types.get(name)
        if found is not None:
            return found
        close = nearest(name, self.types.types)
        raise UnknownNameError(
            f"there is no artifact type '{name}'",
            expected="a name that `steps types` shows",
            hints=(*did_you_mean(close), "steps types"),
        )


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

    def read_pack(self, pack: Pack) -> None:
        self.packs_read += 1
        manifests = 0
        for path in pack.files():
            try:
                manifests += self.read_file(pack, path)
            except ManifestError as error:
                if pack.strict or path.name in ("step.toml", TYPES_FILE):
                    self.add_problem(error, path, pack)
                    manifests += 1
        if not manifests:
            self.problems.append(
                ManifestError(
                    f"pack '{pack.name}' holds no manifest",
                    where=str(pack.base),
                    expected="step.toml files, or a manifests folder",
                )
            )

    def read_file(self, pack: Pack, path: Path) -> bool:
        """Read one file; whether it is a manifest at all. Raises ManifestError when it is not even TOML."""
        file = loader.read_toml(path)
        if path.name == TYPES_FILE:
            self.read_types(file)
        elif "step" in file.data:
            self.read_step(pack, file)
        elif "pipeline" in file.data or "stages" in file.data:
            self.read_pipeline(pack, file)
        elif pack.strict or path.name == "step.toml":
            self.problems.append(
                ManifestError("the file is no manifest", where=f"{path}:1", expected="a [step] or a [pipeline] table")
            )
        else:
            return False
        return True

    def read_types(self, file: loader.TomlFile) -> None:
        types, problems = loader.parse_types(file)
        self.problems.extend(problems)
        for name, parsed in types.items():
            self.types.setdefault(name, []).append((parsed, file))
            for parent in parsed.is_a:
                self.parents.setdefault((name, parent), self.packs_read)

    def read_step(self, pack: Pack, file: loader.TomlFile) -> None:
        table = file.data["step"]
        step_id = table.get("id") if isinstance(table, dict) else None
        config_dir = pack.config_dir(file.path, step_id) if isinstance(step_id, str) else None
        step, problems = loader.parse_step(file, pack=pack.name, config_dir=config_dir)
        if step is None:
            for problem in problems:
                self.add_problem(problem, file.path, pack, step_id if isinstance(step_id, str) else None)
            return
        if not step.produces and not step.consumes:
            self.warnings.append(
                ManifestError(f"step '{step.id}' neither consumes nor produces anything", where=step.where("step"))
            )
        self.warnings.extend(loader.unknown_tables(step))
        self.add(step, "step", pack, file, self.steps.setdefault(step.id, []))

    def read_pipeline(self, pack: Pack, file: loader.TomlFile) -> None:
        pipeline, problems = loader.parse_pipeline(file, pack=pack.name)
        if pipeline is None:
            for problem in problems:
                self.add_problem(problem, file.path, pack, file.path.stem)
        else:
            self.add(pipeline, "pipeline", pack, file, self.pipelines.setdefault(pipeline.name, []))

    def add(self, new: M, kind: str, pack: Pack, file: loader.TomlFile, there: list[M]) -> None:
        """Keep a manifest beside those of the same id. Copies with the same content are one manifest.

        Within a pack two of one id are a mistake, and neither is used: nothing could tell them apart.
        """
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
                self.warnings.append(
                    ManifestError(
                        f"{kind} '{name}' of pack '{other.pack}' is hidden by that of pack '{usable[0].pack}'",
                        where=other.where(*(("step", "id") if kind == "step" else ("pipeline", "name"))),
                        hints=(f"steps plan {other.pack}:{name}   # is the hidden one",),
                    )
                )
        return plain, hidden

    def add_problem(self, error: ManifestError, path: Path, pack: Pack, name: str | None = None) -> None:
        self.problems.append(error)
        if name is None:
            # The file did not parse: its id can still be read off the text, to say why that step is missing.
            match = None
            if path.is_file():
                with path.open("rb") as file:
                    match = re.search(rb'^\s*id\s*=\s*"([^"]+)"', file.read(1 << 16), re.M)
            name = match[1].decode("utf-8", "replace") if match else None
        if name is not None:
            self.broken.setdefault((pack.name, name), error)

    def registry(self, packs: tuple[Pack, ...]) -> Registry:
        steps, hidden_steps = self.usable(self.steps, "step")
        pipelines, hidden_pipelines = self.usable(self.pipelines, "pipeline")
        for name in [name for name in pipelines if name in steps]:
            taken = pipelines.pop(name)
            hidden_pipelines[f"{taken.pack}:{name}"] = taken.model_copy(update={"hidden": True})
            text = f"pipeline '{name}' of pack '{taken.pack}' is hidden by the step of that id"
            self.warnings.append(ManifestError(text, where=taken.where("pipeline", "name")))
        known = {**steps, **hidden_steps}
        graph = self.type_graph()
        graph = graph.without(self.unusable_conversions(graph, known))
        self.check_references(graph, known.values())
        broken = {f"{pack}:{name}": error for (pack, name), error in self.broken.items()}
        for (_, name), error in self.broken.items():
            if name not in steps and name not in pipelines:
                broken.setdefault(name, error)
        return Registry(
            steps=steps,
            pipelines=pipelines,
            types=graph,
            packs=packs,
            problems=tuple(self.problems),
            warnings=tuple(self.warnings),
            broken=broken,
            hidden_steps=hidden_steps,
            hidden_pipelines=hidden_pipelines,
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
                        self.warnings.append(
                            ManifestError(
                                f"type '{name}' is converted to '{target}' by the step an earlier pack names",
                                where=file.where(name, "convert_to", target),
                                expected=convert[target],
                                found=step_id,
                            )
                        )
            first_file = definitions[0][1]
            description = next((d.description for d, _ in definitions if d.description), "")
            where = first_file.where(name)
            validator = next((d.validator for d, _ in definitions if d.validator), None)
            merged[name] = ArtifactType(name, description, tuple(parents), convert, attributes, validator, where)
        return TypeGraph(self.without_bad_parents(merged).values())

    def without_bad_parents(self, merged: dict[str, ArtifactType]) -> dict[str, ArtifactType]:
        """Report unknown parents and is_a cycles, and drop those edges so that the rest can be used."""
        dropped: set[tuple[str, str]] = set()
        for name, artifact_type in merged.items():
            file = self.types[name][0][1]
            for parent in artifact_type.is_a:
                if parent not in merged:
                    dropped.add((name, parent))
                    close = nearest(parent, merged)
                    self.problems.append(
                        ManifestError(
                            f"type '{name}' is_a '{parent}', which is no type",
                            where=file.where(name, "is_a"),
                            hints=did_you_mean(close[:1]),
                        )
                    )
        parents = {n: [p for p in t.is_a if (n, p) not in dropped] for n, t in merged.items()}
        while cycles := find_cycles(parents):
            for cycle in cycles:
                self.problems.append(
                    ManifestError(
                        f"is_a goes in a circle: {' → '.join(cycle)}",
                        where=self.types[cycle[0]][0][1].where(cycle[0], "is_a"),
                        expected="a type is never its own ancestor",
                    )
                )
                # What the latest pack said goes, so that no pack can loosen what the ones before it rely on.
                child, parent = max(pairwise(cycle), key=lambda edge: (self.parents[edge], cycle.index(edge[0])))
                dropped.add((child, parent))
                parents[child] = [p for p in parents[child] if p != parent]
        return {name: replace(t, is_a=tuple(parents[name])) for name, t in merged.items()}

    def unusable_conversions(self, graph: TypeGraph, steps: Mapping[str, StepManifest]) -> list[Conversion]:
        """Conversions whose step is not there or does not do what the type says; each is a warning."""
        gone = []
        for name, artifact_type in graph.types.items():
            for target, step_id in (artifact_type.convert_to or {}).items():
                why = _why_no_converter(graph, name, target, step_id, steps.get(step_id))
                if why is not None:
                    gone.append(Conversion(name, target, step_id))
                    where = self.types[name][0][1].where(name, "convert_to", target)
                    self.warnings.append(
                        ManifestError(f"'{name}' is never converted to '{target}' by itself: {why}", where=where)
                    )
        return gone

    def check_references(self, graph: TypeGraph, steps: Iterable[StepManifest]) -> None:
        """Warn of types that are used but not declared: they relate to no other type."""
        for step in steps:
            used = [("consumes", i, port.type) for i, port in enumerate(step.consumes)]
            used += [
                ("produces", i, kind)
                for i, port in enumerate(step.produces)
                for kind in (port.type, *port.becomes.values())
            ]
            for table, index, type_name in used:
                if type_name not in graph:
                    self.warnings.append(
                        ManifestError(
                            f"type '{type_name}' is not declared in any types.toml",
                            where=step.where(table, index, "type"),
                            hints=did_you_mean(nearest(type_name, graph.types, 1)),
                        )
                    )


def _why_no_converter(
    graph: TypeGraph, source: str, target: str, step_id: str, step: StepManifest | None
) -> str | None:
    """Why a step cannot do the conversion that a type names it for; None if it can."""
    if step is None:
        return f"there is no step '{step_id}'"
    required = [port for port in step.consumes if port.required]
    if len(required) != 1:
        return f"step '{step_id}' needs {len(required)} inputs, not one"
    if not graph.is_a(source, required[0].type):
        return f"step '{step_id}' takes '{required[0].type}'"
    if not any(graph.is_a(port.type, target) for port in step.produces):
        return f"step '{step_id}' produces no '{target}'"
    return None


def _find(name: str, plain: Mapping[str, M], hidden: Mapping[str, M]) -> M | None:
    """By plain id, by `PACK:ID` of a hidden one, or by `PACK:ID` of the one that the plain id is."""
    found = plain.get(name) or hidden.get(name)
    pack, colon, rest = name.partition(":")
    if found is None and colon and rest in plain and plain[rest].pack == pack:
        return plain[rest]
    return found
