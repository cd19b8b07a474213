"""Every shipped training config takes every model it is meant for, or is refused when planned with what mends it.

Models are twins of public ones (twins.py). What is planned is built as well: every rank of one copy of the model, by
the policy's own constructor, in a world of the config's size (build_ranks.py).
"""

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from nemotron_steps.config.layout.parallel_config import ParallelConfig
from nemotron_steps.errors import PlanError
from nemotron_steps.manifest.packs import builtin_pack_root
from nemotron_steps.session.run_request import RunRequest
from nemotron_steps.session.session import Session
from tests.steps.twins import TWINS, write_twin

STEPS = {
    "rl/nemo_rl/rlvr": ("policy", {"prompts": "prompts"}),
    "rl/nemo_rl/swe": ("policy", {"prompts": "prompts"}),
    "rl/nemo_rl/rlhf": ("policy", {"prompts": "prompts", "reward_model": "Llama-3.1-8B"}),
    "rl/nemo_rl/opd": ("policy", {"prompts": "prompts", "teachers.larger": "Llama-3.1-8B"}),
    "rl/nemo_rl/dpo": ("policy", {"preferences": "preferences"}),
    "sft/automodel": ("model", {"chats": "chats"}),
    "sft/megatron_bridge": ("model", {"chats": "chats"}),
    "reward_model/genrm": ("model", {"comparisons": "chats"}),
}
"""Step → the port of the model it trains, and its other ports with what the `given` fixture has for them."""
CONFIGS = sorted(
    (step, file.stem)
    for step in STEPS
    for file in Path(builtin_pack_root(), "configs", step).glob("*.yaml")
    if not file.stem.startswith("tiny") and file.stem != "default"  # models from scratch; another config
)
PUBLISHED = {"rlvr1", "rlvr2", "rlvr3", "swe1", "swe2", "super3", "small", "nano3", "nano3_genrm"}
"""Configs of the Nemotron 3 recipes."""
ROWS = {
    "prompts": {"responses_create_params": {"input": "A or B?"}, "agent_ref": {"name": "mcqa_simple_agent"}},
    "preferences": {"prompt": "A or B?", "chosen": "A", "rejected": "B"},
    "chats": {"messages": [{"role": "user", "content": "A or B?"}, {"role": "assistant", "content": "A"}]},
}


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    root = tmp_path_factory.mktemp("given")
    for name in TWINS:
        write_twin(name, root / name)
    for name, row in ROWS.items():
        (root / name).mkdir()
        (root / name / "train.jsonl").write_text(json.dumps(row) + "\n")
    return root


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    bench = Session(home=str(tmp_path_factory.mktemp("home")))
    bench.describe_input = functools.cache(bench.describe_input)  # a model is looked at once, not at every plan
    return bench


def planned(bench, given, step, config, model, overrides=()):
    """The config of the planned step."""
    port, others = STEPS[step]
    inputs = {port: str(given / model), **{name: str(given / what) for name, what in others.items()}}
    plan = bench.plan(RunRequest(targets=(step,), config=config, inputs=inputs, overrides=overrides))
    return next(entry for entry in plan if entry.step_id == step).config


@pytest.fixture(scope="module")
def mended(bench, given):
    """The planned config; where it is refused, once, with what its first hint mends. Each is planned once."""

    @functools.cache
    def mended(step, config, model):
        try:
            return planned(bench, given, step, config, model)
        except PlanError as error:
            (problem,) = error.problems
            assert problem.code in ("E310", "E312"), problem.render()  # E312: no experts in the embedded generator
            return planned(bench, given, step, config, model, tuple(problem.hints[0].split(" ")))

    return mended


@pytest.mark.parametrize("model", TWINS)
@pytest.mark.parametrize(("step", "config"), CONFIGS)
def test_a_config_takes_a_model_or_says_once_what_mends_it(step, config, model, bench, mended):
    found = mended(step, config, model)
    assert found["policy"]["model_type"] in (None, TWINS[model][0])
    asked, sizes = (ParallelConfig.read(_flat(of).get) for of in (bench.compose(step, config, ()).values, found))
    if not sizes.dtensor:  # no model has too few heads for a shipped layout
        assert (sizes.tensor, sizes.context) == (asked.tensor, asked.context)


def test_teachers_with_gpus_of_their_own_are_planned_over_what_the_cluster_has(bench, given):
    section = "on_policy_distillation.non_colocated_teachers"
    asked = ("rl/nemo_rl/opd", "one_node", "Qwen3-0.6B")
    with pytest.raises(PlanError) as caught:  # the teacher would take the only node
        planned(bench, given, *asked, (f"{section}.enabled=true",))
    (problem,) = caught.value.problems
    assert problem.code == "E310" and problem.hints[0] == "cluster.num_nodes=2"
    assert planned(bench, given, *asked, (f"{section}.enabled=true", problem.hints[0]))
    inputs = {"policy": asked[2], "prompts": "prompts", "teachers.larger": "Llama-3.1-8B"}
    inputs = {name: str(given / what) for name, what in inputs.items()}
    apart = f"{section}.enabled=true", f"{section}.default_teacher_cfg.gpus_per_node=4"
    for overrides, kinds in (((), ["trains and generates"]), (apart, ["trains and generates", "is teacher larger's"])):
        plan = bench.plan(RunRequest(targets=asked[:1], config=asked[1], inputs=inputs, overrides=overrides))
        memory = next(entry for entry in plan if entry.step_id == asked[0]).memory
        assert [device.name for device in memory.devices] == kinds and "teach" in memory.devices[-1].phases
    with pytest.raises(PlanError, match="teacher larger") as caught:  # 32 heads
        own = f"{section}.default_teacher_cfg.tensor_model_parallel_size"
        planned(bench, given, *asked, (f"{section}.enabled=true", "cluster.num_nodes=9", f"{own}=64"))
    assert any(hint.startswith(own) for problem in caught.value.problems for hint in problem.hints)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_is_planned_is_built_on_every_rank(mended, given, tmp_path):
    cases = {}
    for step, config in CONFIGS:
        for model in TWINS:
            if model == "Nemotron-3-Super" and config not in PUBLISHED - {"nano3", "nano3_genrm"}:
                continue  # its 41,000 tensors take long to read
            values = mended(step, config, model)
            sizes = ParallelConfig.read(_flat(values).get)
            layout = (sizes.tensor, sizes.pipeline, sizes.context, sizes.expert, sizes.sequence_parallel)
            if not sizes.dtensor:
                policy = {"megatron_cfg": values["policy"]["megatron_cfg"], "precision": "bfloat16"}
                cases.setdefault((model, *layout, sizes.ranks), (str(given / model), policy, sizes.ranks))
    file = tmp_path / "cases.json"
    file.write_text(json.dumps(list(cases.values())))
    command = [sys.executable, "-m", "tests.steps.build_ranks", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert int(done.stdout.split()[-1]) >= len(cases) > 20


def _flat(values, prefix=""):
    flat = {}
    for name, value in values.items():
        flat[prefix + name] = value
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{name}."))
    return flat
