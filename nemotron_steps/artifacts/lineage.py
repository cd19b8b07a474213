"""Which artifacts an artifact was made from, and which were made from it, by the version records.

An edge belongs to one production: a step's run that read one version and wrote another. Versions with the same bytes
are kept apart, for a step may hand on what it was given.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from nemotron_steps.artifacts.models import Artifact, short_digest
from nemotron_steps.artifacts.store import ArtifactStore


@dataclass(frozen=True)
class Link:
    """One edge of the lineage graph: `child` was produced from `parent`, bound to the producing step's `port`.

    Both are references (`NAME:vN`); `parent` is a short digest where no record says which version it was.
    `step` produced the child, in `run`. `accepted` says who took the parent though the code that made it had changed.
    """

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
        links = {"ancestors": self.ancestors, "descendants": self.descendants}
        return {
            "artifact": self.of.ref,
            "digest": self.of.digest,
            **({"accepted": self.accepted} if self.accepted else {}),
            **{name: [link.to_dict() for link in found] for name, found in links.items()},
        }


def lineage(store: ArtifactStore, artifact: Artifact) -> Lineage:
    """The whole graph above and below one version of an artifact."""
    records = store.list_artifacts()
    digests = {record.ref: record.digest for record in records}
    accepted = {record.ref: record.producer.acceptance for record in records if record.producer}
    links = [
        Link(
            edge.ref if digests.get(edge.ref) == edge.digest else short_digest(edge.digest),
            record.ref,
            edge.port,
            record.producer.step if record.producer else "",
            record.producer.run if record.producer else "",
            accepted.get(edge.ref, ""),
        )
        for record in records
        for edge in record.inputs
    ]
    above = _walk(artifact.ref, links, lambda link: link.child, lambda link: link.parent)
    below = _walk(artifact.ref, links, lambda link: link.parent, lambda link: link.child)
    return Lineage(artifact, tuple(above), tuple(below))


def _walk(start: str, links: Iterable[Link], here: Callable[[Link], str], there: Callable[[Link], str]) -> list[Link]:
    by_end: dict[str, list[Link]] = {}
    for link in dict.fromkeys(links):
        by_end.setdefault(here(link), []).append(link)
    found: list[Link] = []
    seen = {start}
    frontier = [start]
    while frontier:
        following: list[str] = []
        for reference in frontier:
            for link in by_end.get(reference, ()):
                found.append(link)
                if there(link) not in seen:
                    seen.add(there(link))
                    following.append(there(link))
        frontier = following
    return found
