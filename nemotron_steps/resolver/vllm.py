"""Checks of a planned step's vLLMs that are not a policy's: of an evaluated or sampled model, of judges."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nemotron_steps.config.layout.facts import ModelFacts
from nemotron_steps.config.layout.misfits import told
from nemotron_steps.config.layout.vllm_fit import vllm_keys, vllm_misfits
from nemotron_steps.resolver.problems import LayoutProblem

if TYPE_CHECKING:
    from nemotron_steps.resolver.checks import CheckSubject


def vllm_fits(subject: CheckSubject) -> Iterator[LayoutProblem]:
    """vLLM can cut the models as it is asked to, and sample from them (config/layout/vllm_fit.py)."""
    ports = {key: port.name for port in subject.manifest.consumes for key in port.bindings}
    known = {key: ModelFacts.from_attributes(subject.artifacts.get(name, {})) for key, name in ports.items()}
    models = {key: facts for key, facts in known.items() if facts is not None}
    for each in vllm_misfits(models, subject.config.flat.get):
        what, expected, found = told(each.misfits)
        named = [f"'{ports[key]}'" for key in each.models]
        yield LayoutProblem(
            f"vLLM cannot generate from {' and '.join(named)} of {subject.key}: {what}",
            chain=tuple(f"{subject.key}.{ports[key]}" for key in each.models[:1]),
            where=subject.where(each.misfits[0].key),
            expected=expected,
            found=found,
            hints=each.hints,
        )


def generators_have_gpus(subject: CheckSubject) -> Iterator[LayoutProblem]:
    """A generator without a policy finds its GPUs on one node of its cluster (engine/placement/sampling.py)."""
    keys = vllm_keys("model", subject.config.flat.get)
    gpus = subject.integer("cluster.gpus_per_node")
    if keys is None or not gpus or subject.config.flat.get("cluster.backend") != "ray":
        return
    width = subject.integer(keys.width) or 1
    if width <= gpus:
        return
    smaller = max(size for size in range(1, gpus + 1) if width % size == 0)
    experts = subject.integer(keys.experts) if keys.experts is not None else None
    also = f" {keys.experts}={smaller}" if experts is not None and experts > 1 else ""
    yield LayoutProblem(
        f"{subject.key}: a generator needs more GPUs than a node has",
        chain=(subject.key,),
        where=subject.where(keys.width),
        expected=f"at most {gpus} (cluster.gpus_per_node)",
        found=f"{keys.width}={width}",
        hints=(f"{keys.width}={smaller}{also}", f"cluster.gpus_per_node={width}"),
    )
