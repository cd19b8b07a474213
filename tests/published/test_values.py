"""The recipes' configs here have the published values, or a reason not to."""

import pytest

from nemotron_steps.config.profiles import RunTable
from nemotron_steps.config.published import translate
from nemotron_steps.config.schema.rl import RlConfig
from nemotron_steps.config.validation import has_key
from nemotron_steps.environments.registry import AGENTS, environment_class
from nemotron_steps.resolver.request import StepConfig
from nemotron_steps.session.session import Session
from tests.published.page import status
from tests.published.tables import TABLES, flat, nested, published, resolved

ENVIRONMENTS = "env.nemo_gym.environments"
GENRM = "env.nemo_gym.genrm_model.responses_api_models.vllm_model"
EVERYWHERE = {
    "policy.checkpoint": "an input",
    "policy.tokenizer.name": "the tokenizer is the checkpoint's",
    "data.train.data_path": "an input",
    "data.validation.data_path": "an input",
    "grpo.reward_shaping.max_response_length": "of a shaping that is off; its default is the same length",
    "policy.dynamic_batching.train_mb_tokens": "of a batching that is off",
    "policy.dynamic_batching.logprob_mb_tokens": "of a batching that is off",
    "policy.generation.vllm_cfg.expose_http_server": "only agents in servers of their own need it",
    f"{GENRM}.base_url": "a judge that the run starts has no address",
    f"{GENRM}.model": "published as a placeholder in RLHF",
    "policy.megatron_cfg.optimizer.optimizer_offload_fraction": "of an offload that is off",
    f"{ENVIRONMENTS}.code_gen.num_processes": "programs run on one machine: as many at once as it has cores",
}
RLVR = {
    "policy.max_total_sequence_length": "raised from 49,152 to the published 65,536 over the run, as the recipe tells",
    "checkpointing.metric_name": "nothing is validated (val_period -1), so there is no such metric; all are kept",
}
STAGES = {
    "super3_rlvr": ("rlvr", ("rlvr1", "rlvr2", "rlvr3"), RLVR),
    "super3_rlvr_small": ("rlvr", ("small",), RLVR),
    "super3_rlhf": ("rlhf", ("super3",), {}),
    "super3_rlhf_small": ("rlhf", ("small",), {}),
    "super3_swe1": ("swe", ("swe1",), {}),
    "super3_swe1_small": (
        "swe",
        ("small",),
        {"run.env.container": "the recipe's page wants the SWE image of every SWE stage"},
    ),
    "super3_swe2": ("swe", ("swe2",), {}),
    "nano3_rl": ("rlvr", ("nano3",), {}),
}
"""Published config → step, our configs of it, and reasons of what differs."""
OURS_ALONE = {
    "policy.model_type": "what the layout is for",
    "policy.max_total_sequence_length_end": "the published length, which the run ends with",
    "cluster.backend": "Ray, as there",
    "checkpointing.save_async": "the same checkpoint, written beside the training",
    "grpo.async_grpo.straggler_deadline_s": "a bound of waiting; longer than a rollout takes",
    f"{ENVIRONMENTS}.single_step_tool_use_with_argument_comparison": "the environment, with its own settings",
    f"{ENVIRONMENTS}.swe_agents_train.environment": "an agent in a server of its own",
    f"{ENVIRONMENTS}.swe_agents_train.url": "where that is",
    f"{ENVIRONMENTS}.swe_agents_val.environment": "an agent in a server of its own",
    f"{ENVIRONMENTS}.swe_agents_val.url": "where that is",
    "cluster.gpu_memory_gib": "the GPUs that its pages count, in prose",
    **{
        f"{ENVIRONMENTS}.{name}": "named by env.nemo_gym.config_paths"
        for name in ("code_gen", "math_formal_lean", "ns_tools", "swerl_gen")
    },
    **{
        f"env.nemo_gym.{role}.responses_api_models.vllm_model.{key}": "how long a judge may take to load, and retries"
        for role in ("genrm_model", "judge_model", "safety_model")
        for key in ("readiness_timeout_s", "max_retries", "max_sequences")
    },
}
"""Keys that are set here and not there."""
NOT_COMPARED = {
    "nano3_data_prep": "names its input alone",
    "super3_data_prep": "compared below",
    "nano3_page": "has other names of keys that nano3_rl has, compared there",
    "super3_rlvr2": "changes its inputs alone",
    "super3_rlvr3": "changes its inputs alone",
    "super3_rlvr_test": "a script of its own; `test` has its sizes",
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Session(home=str(tmp_path_factory.mktemp("home")))


def theirs(table):
    """The published config in our keys, without those that are refused."""
    refused = {"policy.tokenizer.name", f"{GENRM}.base_url"}
    taken = {key: value for key, value in resolved(table).items() if key not in refused and status(key)[0] != "refused"}
    job = {key: taken.pop(key) for key in sorted(taken) if has_key(RunTable, key)}
    translated, problems = translate(nested(taken), lambda key: has_key(RlConfig, key), {})
    assert problems == []
    valid = dict(flat(RlConfig.model_validate(translated).model_dump(mode="json")))
    return {**{key: valid.get(key, value) for key, value in flat(translated)}, **job}


def test_every_published_config_is_compared():
    assert set(TABLES) == set(STAGES) | set(NOT_COMPARED)


@pytest.mark.parametrize(
    ("table", "config"), [(t, config) for t, (_, configs, _) in STAGES.items() for config in configs]
)
def test_a_stage_has_the_published_values(table, config, bench, monkeypatch):
    monkeypatch.delenv("RL_REWARD_MODEL", raising=False)
    step, _, reasons = STAGES[table]
    composed = bench.compose(f"rl/nemo_rl/{step}", config, ())
    ours = {**composed.flat, "run.env.container": composed.job["container_image"][0]}
    different = {key: (value, _ours(ours, key)) for key, value in theirs(table).items() if _ours(ours, key) != value}
    unexplained = {key: both for key, both in different.items() if key not in EVERYWHERE and key not in reasons}
    assert unexplained == {}
    usual = dict(flat(RlConfig().model_dump(mode="json")))
    composed = dict(flat(bench.compose(f"rl/nemo_rl/{step}", config, ()).values))
    alone = {key for key, value in composed.items() if value != usual.get(key)} - theirs(table).keys()
    assert alone <= OURS_ALONE.keys()
    assert set(reasons) <= set(different), "a reason for what does not differ"


def ours(planned):
    """Dotted key → value of a planned step's config."""
    values = {**StepConfig(planned.config).flat, "run.env.container": planned.job.get("container_image", [None])[0]}
    return lambda key: _ours(values, key)


def _ours(values, key):
    """A value of our config; an agent has the settings of its environment, and those have defaults of their own."""
    if key in values or not key.startswith(f"{ENVIRONMENTS}."):
        return values.get(key)
    name, *rest = key.removeprefix(f"{ENVIRONMENTS}.").split(".")
    if name in AGENTS:
        return _ours(values, ".".join((ENVIRONMENTS, AGENTS[name].environment, *rest)))
    node = environment_class(name).config_class()
    for part in rest:
        node = getattr(node, part)
    return node


@pytest.mark.parametrize("config", ["rlvr1", "rlvr2", "rlvr3", "swe1", "swe2", "rlhf"])
def test_data_preparation_holds_out_as_many_rows(config, bench):
    theirs = published("super3_data_prep")
    ours = bench.compose("data_prep/rl_prep", f"super3_{config}", ()).flat
    assert (ours["rows.validation"], ours["sample"]) == (theirs["val_holdout"], theirs["sample"])
