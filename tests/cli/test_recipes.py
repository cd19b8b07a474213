"""`nemotron super3 ...`, `nemotron nano3 ...`: what each command becomes, and what it refuses."""

from pathlib import Path

import pytest

from nemotron_steps.artifacts.models import Producer
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.cli.main import nemotron, steps
from nemotron_steps.cli.parser import COMMANDS
from nemotron_steps.manifest.registry import load_registry
from tests.cli.conftest import Cli, in_process
from tests.cli.test_model_plans import hub_folder
from tests.config.layout.memory.shapes import NANO_30B, SUPER_120B

ENV = """\
[YOUR-CLUSTER]
executor = "slurm"
account = "research"
partition = "batch"
nodes = 32
gpus_per_node = 8
"""


SAMPLED = " ".join(f"rlvr{n}.{word}" for word in ("mirror=x", "sample=9") for n in (1, 2, 3))


@pytest.fixture
def nemo(workplace: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run `nemotron ARGUMENTS` in this process."""
    return in_process(nemotron, capsys)


def test_every_command_has_its_step_and_every_name_its_config() -> None:
    registry = load_registry()
    for path, recipe in COMMANDS.items():
        step = registry.find_step(recipe.target)
        if step is None:
            assert registry.find_pipeline(recipe.target) is not None, path
            assert recipe.config is None and not recipe.configs
            continue
        assert {recipe.config, *recipe.configs.values()} <= set(step.config_names), path
        assert {recipe.configs.get(name, name) for name in recipe.only} <= set(step.config_names), path


@pytest.mark.parametrize(
    ("command", "meant"),
    [
        ("super3 data prep rl", "super3_data_prep --until rlhf"),
        ("super3 data prep rl rlvr mirror=x --sample 9", "super3_data_prep --until rlvr3 " + SAMPLED),
        ("super3 rl rlvr -c rlvr2 grpo.seed=7", "rl/nemo_rl/rlvr -c rlvr2 grpo.seed=7"),
        ("super3 rl rlvr -c test", "rl/nemo_rl/rlvr -c test"),
        ("super3 rl swe2", "rl/nemo_rl/swe -c swe2"),
        ("super3 rl rlhf -c default", "rl/nemo_rl/rlhf -c super3"),
        ("nano3 rl -c default -r YOUR-CLUSTER", "rl/nemo_rl/rlvr -c nano3 -r YOUR-CLUSTER"),
        ("nano3 rl --batch YOUR-CLUSTER --force-squash", "rl/nemo_rl/rlvr -c nano3 -b YOUR-CLUSTER --force-squash"),
    ],
)
def test_a_recipes_command_is_a_step_with_its_config(nemo: Cli, cli: Cli, command: str, meant: str) -> None:
    Path("env.toml").write_text(ENV)
    ours = nemo(*command.split(), "--dry-run", "--json")
    assert ours.code == 0, ours.err
    ours, theirs = ours.json, cli("run", *meant.split(), "-d", "--json").json
    for problem in (*ours["unfilled"], *theirs["unfilled"]):
        del problem["hints"]  # each as it was typed
    assert ours == theirs


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("super3 rl rvlr", ["'rvlr' is not a command", "rlvr, swe1, swe2, rlhf", "nemotron super3 rl rlvr"]),
        ("super3 -r X rl rlvr", ["'-r' stands before the command"]),
        ("nano3 rl rlvr", ["takes overrides, key=value", "rlvr"]),
        ("super3 data prep rl -d rlvr", ["takes overrides", "nemotron super3 data prep rl rlvr ..."]),
        ("super3 rl swe2 -c small", ["has no config 'small'", "default, swe2"]),
    ],
)
def test_what_a_recipe_refuses(nemo: Cli, command: str, said: list[str]) -> None:
    refused = nemo(*command.split())
    assert refused.code == 2
    for text in said:
        assert text in refused.err, refused.err


def test_a_run_is_resumed_under_its_recipes_command(
    nemo: Cli, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = nemo("nano3", "data", "prep", "rl", "-c", "tiny", "rows.train=8", "rows.heldout=4", "--json").json
    again = nemo("nano3", "data", "prep", "rl", "--resume", done["run"], "--json")
    assert again.code == 0 and again.json["run"] == done["run"]
    capsys.readouterr()
    assert steps(["status", done["run"], "--json"]) == 0


CHAIN = (
    ("super3 rl rlvr -c rlvr1", "sft/megatron_bridge -c super3", "super3_rlvr1"),
    ("super3 rl rlvr -c rlvr2", "rl/nemo_rl/rlvr -c rlvr1", "super3_rlvr2"),
    ("super3 rl swe1", "rl/nemo_rl/rlvr -c rlvr3", "super3_swe1"),
    ("super3 rl swe2", "rl/nemo_rl/swe -c swe1", "super3_swe2"),
    ("super3 rl rlhf", "rl/nemo_rl/swe -c swe2", "super3_rlhf"),
    ("super3 rl rlvr -c small", "sft/megatron_bridge -c super3", "super3_rlvr1"),
    ("nano3 rl", "sft/megatron_bridge -c nano3", "nano3"),
    ("nano3 rl -c nano3_genrm", "rl/nemo_rl/rlvr -c nano3", "nano3"),
)
"""A stage's command, what makes its policy, and the config of data_prep/rl_prep that makes its prompts."""


@pytest.mark.parametrize(
    ("command", "before"),
    [
        ("super3 rl rlvr --run P", "steps run sft/megatron_bridge -c super3 --run P"),
        ("super3 rl rlvr -c rlvr2 -b P", "steps run rl/nemo_rl/rlvr -c rlvr1 -b P"),
        ("super3 rl rlvr -c rlvr3 --run P", "steps run rl/nemo_rl/rlvr -c rlvr2 --run P"),
        ("super3 rl rlhf -c small", "steps run rl/nemo_rl/swe -c small"),
        (
            "super3 rl rlvr inputs.prompts.existing=require --run P",
            "steps run data_prep/rl_prep -c super3_rlvr1 --run P",
        ),
        (
            "super3 rl swe2 inputs.prompts.existing=require --run=P",
            "steps run data_prep/rl_prep -c super3_swe2 --run=P",
        ),
        ("steps run rl/nemo_rl/rlvr -c rlvr2 -r P", "steps run rl/nemo_rl/rlvr -c rlvr1 -r P"),
    ],
)
def test_what_is_to_be_run_before_is_told_under_the_same_profile(nemo: Cli, command: str, before: str) -> None:
    Path("env.toml").write_text(ENV.replace("YOUR-CLUSTER", "P"))
    refused = nemo(*command.split())
    assert refused.code == 2 and f"hint: nemotron {before}\n" in refused.err, refused.err
    assert f" nemotron {before}\n" in nemo(*command.split(), "-d").out
    unfilled = nemo(*command.split(), "-d", "--json").json["unfilled"]
    assert f"nemotron {before}" in [hint for each in unfilled for hint in each["hints"]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home in which the page's commands were all run, each stage's data before it, with sizes of the real models."""
    folder = tmp_path_factory.mktemp("made")
    store = ArtifactStore(folder / "home")
    for number, (_, made_by, prep) in enumerate(CHAIN):
        step, _, config = made_by.partition(" -c ")
        staged = folder / f"model{number}"
        sizes = NANO_30B if "nano3" in made_by else SUPER_120B
        staged.mkdir()
        hub_folder(staged / "hf", **sizes, num_hidden_layers=len(sizes["hybrid_override_pattern"]))
        (staged / "weights").mkdir()
        (staged / "weights" / "0.distcp").write_text(made_by)
        left = Producer(step, "model", "a-run", "1", f"{number:032x}", config)
        store.commit(staged, "checkpoint_megatron", name=f"{step}/model", producer=left)
        staged = folder / f"rows{number}"
        staged.mkdir()
        row = '{"responses_create_params": {"input": "%s"}, "agent_ref": {"name": "mcqa_simple_agent"}}\n'
        (staged / "train-split.jsonl").write_text(row % prep)
        left = Producer("data_prep/rl_prep", "prompts", "a-run", "1", f"{number:032x}", prep)
        store.commit(staged, "rl_prompts", name="data_prep/rl_prep/prompts", producer=left)
    return folder / "home"


@pytest.mark.parametrize(("command", "made_by", "prep"), CHAIN)
def test_a_stage_takes_what_the_commands_before_it_left(
    nemo: Cli, trained: Path, command: str, made_by: str, prep: str
) -> None:
    store, (step, _, config) = ArtifactStore(trained), made_by.partition(" -c ")
    found = nemo(*command.split(), "-d", "--json", "--home", str(trained))
    assert found.code == 0 and found.json["unfilled"] == [], found.err
    (planned,) = found.json["steps"]
    policy, prompts = (store.find(planned["inputs"][port]["ref"]) for port in ("policy", "prompts"))
    assert (policy.producer.step, policy.producer.config) == (step, config)
    assert (prompts.producer.step, prompts.producer.config) == ("data_prep/rl_prep", prep)
    taken = f"policy of {planned['key']} is {policy.ref}, the newest that {made_by} left here"
    assert any(taken in warning and "--input policy=REF takes another" in warning for warning in found.json["warnings"])
    # Overrides of the source say what is wanted: it is made.
    wanted = 'inputs.prompts.overrides=["sample=5"]'
    made = nemo(*command.split(), wanted, "-d", "--json", "--home", str(trained))
    assert next(each["step"] for each in made.json["steps"]) == "data_prep/rl_prep"
