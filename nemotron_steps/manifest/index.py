"""What `steps list` and `steps types` show, as plain rows from a cache, with the standard library only.

The cache holds while paths, times and sizes of every manifest file are those that it was made from. One that is
missing, unreadable or of another version is rebuilt without a word; one that cannot be written costs only time.
"""

import contextlib
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

from nemotron_steps.config.locations import cache_folder, read_json, write_json
from nemotron_steps.config.names import by_alias
from nemotron_steps.errors import ManifestError
from nemotron_steps.manifest.packs import (
    PATH_VARIABLE,
    PackSearch,
    find_packs,
)
from nemotron_steps.manifest.typegraph import ArtifactType, TypeGraph

FORMAT = 9
"""Version of the cache file; raise it when its rows or how they are made change."""


@dataclass(frozen=True)
class PortRow:
    """An input or output port."""

    name: str
    type: str
    required: bool


@dataclass(frozen=True)
class StepRow:
    """One step, as a listing shows it."""

    id: str
    """What it goes by: its plain id, or `PACK:ID` where an earlier pack has that."""
    name: str
    category: str
    description: str
    tags: tuple[str, ...]
    consumes: tuple[PortRow, ...]
    produces: tuple[PortRow, ...]
    pack: str
    file: str
    runnable: bool
    """Whether it names a function to run; steps of the public layout can be planned only."""
    aliases: tuple[str, ...] = ()

    @property
    def plain_id(self) -> str:
        """The id as its manifest has it."""
        return self.id.rpartition(":")[2]

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable form."""
        return asdict(self)


@dataclass(frozen=True)
class PipelineRow:
    """One pipeline, as a listing shows it."""

    name: str
    description: str
    tags: tuple[str, ...]
    steps: tuple[str, ...]
    pack: str
    file: str

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable form."""
        return asdict(self)


@dataclass(frozen=True)
class Index:
    """Rows of every step, pipeline and type, and what is wrong with the packs."""

    steps: tuple[StepRow, ...]
    pipelines: tuple[PipelineRow, ...]
    types: TypeGraph
    problems: tuple[ManifestError, ...] = ()
    warnings: tuple[ManifestError, ...] = ()
    from_cache: bool = field(default=False, compare=False)

    def step(self, step_id: str) -> StepRow | None:
        """The row of a step by `ID`, `PACK:ID` or alias, None if there is none."""
        names = {**{f"{row.pack}:{row.plain_id}": row for row in self.steps}, **{row.id: row for row in self.steps}}
        if step_id in names or any(pipeline.name == step_id for pipeline in self.pipelines):
            return names.get(step_id)
        return names.get(by_alias(step_id, {row.id: row.aliases for row in self.steps if row.id == row.plain_id}) or "")

    def select(
        self,
        *,
        category: str | None = None,
        consumes: str | None = None,
        produces: str | None = None,
        tag: str | None = None,
    ) -> tuple[StepRow, ...]:
        """Steps that match every filter given.

        `consumes`: an input accepts an artifact of this type; `produces`: an output can be used as it."""
        return tuple(
            row
            for row in self.steps
            if (category is None or row.category == category)
            and (tag is None or tag in row.tags)
            and (consumes is None or any(self.types.is_a(consumes, port.type) for port in row.consumes))
            and (produces is None or any(self.types.is_a(port.type, produces) for port in row.produces))
        )


def load_index(
    *, environ: Mapping[str, str] | None = None, cwd: Path | None = None, cache_dir: Path | None = None
) -> Index:
    """The index of every pack, from the cache where nothing changed.

    `environ` has STEPS_PATH and XDG_CACHE_HOME; a `manifests` folder of `cwd` is a pack."""
    environ = os.environ if environ is None else environ
    cwd = Path.cwd() if cwd is None else cwd
    folder = cache_folder(environ) if cache_dir is None else cache_dir
    of = "\0".join((sys.prefix, str(Path(__file__)), str(cwd), environ.get(PATH_VARIABLE, "")))
    path = folder / f"index-{crc32(of.encode()):08x}.json"
    search = find_packs(environ=environ, cwd=cwd)
    files = [FORMAT, *_fingerprint(search)]
    cached = read_json(path)
    if isinstance(cached, dict) and cached.get("files") == files:
        return _decode(cached)
    index = build_index(search)
    content = {
        "files": files,
        "steps": [row.to_dict() for row in index.steps],
        "pipelines": [row.to_dict() for row in index.pipelines],
        "types": [asdict(artifact_type) for artifact_type in index.types.types.values()],
        "problems": [vars(error) for error in index.problems],
        "warnings": [vars(error) for error in index.warnings],
    }
    write_json(path, content)
    return index


def build_index(search: PackSearch) -> Index:
    """The index from the manifests themselves; imports pydantic."""
    from nemotron_steps.manifest.registry import load_registry

    registry = load_registry(search)
    steps = tuple(
        StepRow(
            id=step.id,
            name=step.step.name,
            category=step.step.category,
            description=step.step.description or step.step.summary,
            tags=step.step.tags,
            consumes=tuple(PortRow(port.name, port.type, port.required) for port in step.consumes),
            produces=tuple(PortRow(port.name, port.type, port.required) for port in step.produces),
            pack=step.pack,
            file=str(step.file),
            runnable=step.step.entry is not None,
            aliases=step.step.aliases,
        )
        for step in sorted([*registry.steps.values(), *registry.hidden_steps.values()], key=lambda step: step.step.id)
    )
    pipelines = tuple(
        PipelineRow(
            name=pipeline.name,
            description=pipeline.pipeline.description,
            tags=pipeline.pipeline.tags,
            steps=tuple(stage.step for stage in pipeline.stages),
            pack=pipeline.pack,
            file=str(pipeline.file),
        )
        for pipeline in [*registry.pipelines.values(), *registry.hidden_pipelines.values()]
    )
    return Index(steps, pipelines, registry.types, registry.problems, registry.warnings)


def _fingerprint(search: PackSearch) -> list[list[Any]]:
    """[path, mtime in ns, size] of every manifest file, and one entry per pack and per problem of the search."""
    entries: list[list[Any]] = [["pack", pack.name, str(pack.base)] for pack in search.packs]
    entries += [["problem", problem.what, problem.where] for problem in search.problems]
    for pack in search.packs:
        for file in pack.files():
            time, size = 0, -1  # of a dangling link: reading it is the registry's problem to report
            with contextlib.suppress(OSError):
                time, size = file.stat().st_mtime_ns, file.stat().st_size
            entries.append([str(file), time, size])
    return entries


def _decode(data: Mapping[str, Any]) -> Index:
    def fields(row: Mapping[str, Any]) -> dict[str, Any]:
        """Lists are tuples in rows, and those of tables are ports."""
        made = {name: [PortRow(**port) for port in row[name]] for name in ("consumes", "produces") if name in row}
        return {name: tuple(value) if isinstance(value, list) else value for name, value in {**row, **made}.items()}

    return Index(
        tuple(StepRow(**fields(row)) for row in data["steps"]),
        tuple(PipelineRow(**fields(row)) for row in data["pipelines"]),
        TypeGraph(ArtifactType(**fields(row)) for row in data["types"]),
        tuple(ManifestError(**row) for row in data["problems"]),
        tuple(ManifestError(**row) for row in data["warnings"]),
        from_cache=True,
    )
