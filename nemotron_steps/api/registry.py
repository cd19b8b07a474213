"""What there is: steps, pipelines, artifact types and the packs they come from. Answered from the cached index."""

from functools import cached_property
from typing import Any

from nemotron_steps.cli.catalog import selected, step_fields, type_fields
from nemotron_steps.errors import StepsError
from nemotron_steps.manifest.index import Index, StepRow, load_index


class Registry:
    """Every step that can be found from here: built in, installed, on STEPS_PATH or below ./manifests.

    Read when it is first asked; a new Registry looks again.
    """

    @cached_property
    def _index(self) -> Index:
        return load_index()

    def list(
        self, *, category: str | None = None, consumes: str | None = None, produces: str | None = None, tag: str = ""
    ) -> list[StepRow]:
        """Steps that match every filter given, as `steps list`; a type stands for its subtypes.

        Raises UnknownNameError for an unknown type or category.
        """
        return selected(self._index, category, consumes, produces, (tag,) if tag else ())

    def show(self, step: str) -> dict[str, Any]:
        """A step's ports, configs (name → file) and manifest, as `steps show STEP --json`.

        Raises UnknownNameError with the nearest ids, or the ManifestError that broke it.
        """
        return step_fields(self._index, step)

    @property
    def types(self) -> dict[str, dict[str, Any]]:
        """Artifact types: what each is, converts to, is made by and is read by."""
        return type_fields(self._index)

    @property
    def pipelines(self) -> dict[str, tuple[str, ...]]:
        """Pipelines and the steps of their stages."""
        return {row.name: row.steps for row in self._index.pipelines}

    @property
    def packs(self) -> dict[str, tuple[str, ...]]:
        """Packs and the ids of their steps."""
        rows = self._index.steps
        return {pack: tuple(row.id for row in rows if row.pack == pack) for pack in dict.fromkeys(r.pack for r in rows)}

    @property
    def problems(self) -> tuple[StepsError, ...]:
        """What is wrong with manifests that were found; the others are not affected."""
        return tuple(self._index.problems)

    def __repr__(self) -> str:
        return f"Registry({len(self._index.steps)} steps, {len(self.pipelines)} pipelines, {len(self.packs)} packs)"
