"""Time of `resolve` for chains of 10, 100 and 1,000 steps, packs already read.

    python benchmarks/bench_resolver.py

Two shapes: every output fits the next step, and every output has to be converted first (so the plan has almost twice
as many steps as were asked for). Each figure is the median of several runs, and the best. The last line is JSON.
"""

import gc
import json
import statistics
import time
from collections.abc import Sequence

from nemotron_steps.manifest.models import Consumes, Parameter, Produces, StepManifest, StepTable
from nemotron_steps.manifest.registry import Registry
from nemotron_steps.manifest.typegraph import ArtifactType, TypeGraph
from nemotron_steps.resolver.plan import Plan, SuppliedInput
from nemotron_steps.resolver.request import StepConfig, request_for_steps
from nemotron_steps.resolver.resolve import resolve

BUDGET_MS = 50.0
"""What 1,000 steps may take."""

VALUES = {
    "grpo": {"num_prompts_per_step": 16, "num_generations_per_prompt": 8},
    "policy": {"train_global_batch_size": 128, "checkpoint": None, "precision": "bfloat16"},
    "cluster": {"num_nodes": 1, "gpus_per_node": 8},
}
"""As large as the checks need; composing real configs is measured with `steps run --dry-run`."""


def registry_of_chain(length: int, *, convert: bool) -> Registry:
    """Steps s0, s1, … where each consumes what the one before produces, or, with `convert`, what it converts to."""
    types = [ArtifactType("root")]
    steps: dict[str, StepManifest] = {}
    for index in range(length + 1):
        if convert:
            types.append(ArtifactType(f"raw{index}", is_a=("root",), convert_to={f"t{index}": f"convert/c{index}"}))
            steps[f"convert/c{index}"] = StepManifest(
                step=StepTable(id=f"convert/c{index}"),
                consumes=(Consumes(type=f"raw{index}"),),
                produces=(Produces(type=f"t{index}"),),
            )
        types.append(ArtifactType(f"t{index}", is_a=("root",)))
    for index in range(length):
        produced = f"raw{index + 1}" if convert else f"t{index + 1}"
        steps[f"s{index}"] = StepManifest(
            step=StepTable(id=f"s{index}"),
            consumes=(Consumes(name="data", type=f"t{index}", bind="policy.checkpoint"),),
            produces=(Produces(name="out", type=produced, inherits="data"),),
            parameters=(Parameter(name="policy.precision", choices=("bfloat16", "float32")),),
        )
    return Registry(steps, {}, TypeGraph(types))


def plan_chain(registry: Registry, length: int) -> Plan:
    """Resolve the whole chain from one supplied artifact."""
    request = request_for_steps([f"s{index}" for index in range(length)], inputs={"s0.data": "start"})
    return resolve(
        request,
        registry,
        compose=lambda step_id, config_name, overrides: StepConfig(VALUES),
        describe_input=lambda ref, wanted: SuppliedInput(ref, wanted, {"tokenizer": "a"}),
    )


def measure(length: int, *, convert: bool, repeats: int) -> dict[str, float]:
    """Median and best wall milliseconds over `repeats` cold resolutions (a fresh type graph each time), and the best
    of processor time, which other work on the machine distorts less."""
    times, processor = [], []
    for _ in range(repeats):
        registry = registry_of_chain(length, convert=convert)
        gc.collect()
        start, start_processor = time.perf_counter(), time.process_time()
        plan = plan_chain(registry, length)
        times.append(1000 * (time.perf_counter() - start))
        processor.append(1000 * (time.process_time() - start_processor))
        assert len(plan) == (2 * length - 1 if convert else length)
    figures = {"median_ms": statistics.median(times), "best_ms": min(times), "best_cpu_ms": min(processor)}
    return {name: round(value, 2) for name, value in figures.items()}


def main(lengths: Sequence[int] = (10, 100, 1000), repeats: int = 15) -> dict[str, object]:
    """Print a table, then JSON; returns the figures."""
    figures: dict[str, object] = {"benchmark": "resolver", "budget_ms": BUDGET_MS}
    print(f"{'steps':>6}  {'direct ms (best)':>18}  {'converted ms (best)':>20}")
    for length in lengths:
        direct = measure(length, convert=False, repeats=repeats)
        converted = measure(length, convert=True, repeats=repeats)
        figures[str(length)] = {"direct": direct, "converted": converted}
        print(
            f"{length:>6}  {direct['median_ms']:>9} ({direct['best_ms']:>6})  "
            f"{converted['median_ms']:>11} ({converted['best_ms']:>6})"
        )
    print(json.dumps(figures))
    return figures


if __name__ == "__main__":
    main()
