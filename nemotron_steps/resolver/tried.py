"""Whether a step passes its arithmetic once something is changed: what is asked before that is offered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nemotron_steps.resolver.checks import CheckSubject

NODES, GPUS = "cluster.num_nodes", "cluster.gpus_per_node"
PROFILE = {NODES: "nodes", GPUS: "gpus_per_node"}
"""Config key → what a profile calls it."""


def passes(subject: CheckSubject | None) -> bool:
    """Whether nothing is refused of a step's layout, its teachers', its cluster's size and its memory; None, which is a
    config that cannot be composed, does not pass."""
    if subject is None or subject.misfits or subject.teacher_misfits or any(True for _ in beyond_profile(subject)):
        return False
    return not (subject.memory and subject.memory.shortages)


def beyond_profile(subject: CheckSubject) -> Iterator[tuple[str, int, int]]:
    """Config key, what it asks for and what the profile has, where that is less."""
    for key, offered in offers(subject).items():
        wanted = subject.integer(key)
        if wanted is not None and wanted > offered:
            yield key, wanted, offered


def offers(subject: CheckSubject) -> dict[str, int]:
    """Config key → the most that its profile has of it, where that is said."""
    found = {key: subject.profile.get(name) for key, name in PROFILE.items()}
    return {key: offered for key, offered in found.items() if type(offered) is int}
