"""Which artifacts an artifact was made from, and which were made from it, by the version records.

An edge belongs to one production: a step's run that read one version and wrote another. Versions with the same bytes
are kept apart, for a step may hand on what it was given.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nemotron_steps.artifacts.models import Artifact, short_digest
from nemotron_steps.artifacts.store import ArtifactStore


@dataclass(frozen=True)
class Link:
    """One edge: `child` was produced by `step` in `run` from `parent`, bound to its `port`. Both are references;
    `parent` is a short digest where no record says which version it was. `accepted`: who took the parent though the
    code that made it had changed."""

    parent: str
    child: str
    port: str
    step: str
    run: str
    accepted: str = ""

    def to_dict(self) -> dict[str, str]:
        """JSON-serialisable form."""
        return {name: text for name, text in vars(self).items() if text or name != "accepted"}


@dataclass(frozen=True)
class Lineage:
    """Ancestors and descendants of one artifact, each edge once, nearest first."""

    of: Artifact
    ancestors: tuple[Link, ...]
    descendants: tuple[Link, ...]

    @property
    def accepted(self) -> str:
        """Who accepted the artifact itself."""
        return self.of.producer.acceptance if self.of.producer else ""

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable form."""
        return {
            "artifact": self.of.ref,
            "digest": self.of.digest,
            **({"accepted": self.accepted} if self.accepted else {}),
            "ancestors": [link.to_dict() for link in self.ancestors],
            "descendants": [link.to_dict() for link in self.descendants],
        }


def lineage(store: ArtifactStore, artifact: Artifact) -> Lineage:
    """The whole graph above and below one version of an artifact."""
    records = store.list_artifacts()
    digests = {record.ref: record.digest for record in records}
    accepted = {record.ref: record.producer.acceptance for record in records if record.producer}
    links = []
    for record in records:
        step, run = (record.producer.step, record.producer.run) if record.producer else ("", "")
        for edge in record.inputs:
            parent = edge.ref if digests.get(edge.ref) == edge.digest else short_digest(edge.digest)
            links.append(Link(parent, record.ref, edge.port, step, run, accepted.get(edge.ref, "")))
    above, below = (_walk(artifact.ref, links, *ends) for ends in (("child", "parent"), ("parent", "child")))
    return Lineage(artifact, above, below)


def _walk(start: str, links: Iterable[Link], here: str, there: str) -> tuple[Link, ...]:
    by_end: dict[str, list[Link]] = {}
    for link in dict.fromkeys(links):
        by_end.setdefault(getattr(link, here), []).append(link)
    found: list[Link] = []
    reached = [start]
    for reference in reached:
        for link in by_end.get(reference, ()):
            found.append(link)
            if getattr(link, there) not in reached:
                reached.append(getattr(link, there))
    return tuple(found)
