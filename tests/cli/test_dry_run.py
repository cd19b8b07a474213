"""`steps run --dry-run` needs no data, no model and no GPU: it compiles, prints, and says what is still missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.cli.conftest import Cli
from tests.config.layout.memory.shapes import QWEN3_8B
from tests.models.checkpoints import write_tokenizer

DEFAULTS = (
    "convert/hf_to_megatron",
    "convert/megatron_to_hf",
    "data_prep/rl_prep",
    "data_prep/sft_prep",
    "eval/model_eval",
    "reward_model/genrm",
    "rl/nemo_rl/dpo",
    "rl/nemo_rl/opd",
    "rl/nemo_rl/rlhf",
    "rl/nemo_rl/rlvr",
    "rl/nemo_rl/swe",
    "sft/automodel",
    "sft/megatron_bridge",
)


@pytest.mark.parametrize("step", DEFAULTS)
def test_the_default_of_every_step_dry_runs_with_nothing_supplied(cli: Cli, step: str) -> None:
    shown = cli("run", step, "-c", "default", "--dry-run", "--json")
    assert shown.code == 0, shown.out
    assert shown.json["steps"][-1]["step"] == step and shown.json["configs"][step]


def test_what_is_missing_is_listed_and_a_run_without_it_is_refused(cli: Cli, workplace: Path) -> None:
    shown = cli("run", "toy/train", "-d", "judge.model=/path/to/judge")
    assert shown.code == 0 and yaml.safe_load(shown.out.partition("\n\n")[0])["steps"] == 6
    lines = shown.out.splitlines()
    assert any(line.endswith("rows ← ?") for line in lines)
    assert lines[lines.index("to be filled in before it can run: 2") + 1] == (
        "  ○ nothing feeds 'rows' of toy/train: toy_data"
    )
    assert "      --input rows=PATH" in lines
    assert "  ○ 'judge.model' of toy/train still has to be filled in: a real value" in lines
    assert not (workplace / "home" / "runs").exists()
    refused = cli("run", "toy/train", "judge.model=/path/to/judge")
    assert refused.code == 2 and "error[E303]" in refused.err and "error[E307]" in refused.err
    assert cli("plan", "toy/train").code == 2


def test_a_model_without_its_weights_is_planned_with_and_not_run(cli: Cli, workplace: Path) -> None:
    model = workplace / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({**QWEN3_8B, "max_position_embeddings": 40960}))
    given = ("convert/hf_to_megatron", "--input", f"checkpoint_hf={model}")
    assert "no tokenizer" in cli("run", *given, "-d").err
    write_tokenizer(model)
    shown = cli("run", *given, "-d", "--json")
    assert shown.code == 0, shown.err
    (step,) = shown.json["steps"]
    assert step["inputs"]["checkpoint_hf"]["attributes"]["hidden_size"] == QWEN3_8B["hidden_size"]
    (lacking,) = shown.json["unfilled"]
    assert lacking["what"] == "the checkpoint has no safetensors weights" and lacking["where"] == str(model)
    for command in ("plan", "run"):
        refused = cli(command, *given)
        assert refused.code == 2 and "hf download MODEL --local-dir" in refused.err


def test_the_profile_is_printed_without_its_secrets(cli: Cli, workplace: Path) -> None:
    (workplace / "env.toml").write_text(
        '[far]\nexecutor = "slurm"\nrun_partition = "quick"\nenv_vars = { HF_TOKEN = "hf-0123456789" }\n'
        'setup_lines = ["export API_TOKEN=abcdefgh1"]\n'
    )
    shown = cli("run", "toy/train", "-c", "tiny", "-d", "-r", "far")
    assert shown.code == 0
    profile = yaml.safe_load(shown.out.partition("# profile far\n")[2].partition("\n\n")[0])
    assert profile == {
        "executor": "slurm",
        "run_partition": "quick",
        "setup_lines": ["export API_TOKEN=***"],
        "env_vars": {"HF_TOKEN": "***"},
    }
    as_json = cli("run", "toy/train", "-c", "tiny", "-d", "-b", "far", "--json")
    assert as_json.json["profile"]["name"] == "far" and as_json.json["profile"]["run_partition"] == "quick"
    assert "abcdefgh1" not in as_json.out and "hf-0123456789" not in as_json.out


def test_an_environment_variable_that_changes_nothing_is_mentioned(
    cli: Cli, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warnings(*command: str) -> list[str]:
        found: list[str] = cli("plan", *command, "--json").json["warnings"]
        return found

    assert warnings("rl/nemo_rl/rlhf", "-c", "tiny") == []
    monkeypatch.setenv("RL_REWARD_MODEL", "")
    assert warnings("rl/nemo_rl/rlvr", "-c", "tiny") == []
    judge = cli("run", "rl/nemo_rl/rlhf", "-c", "default", "-d", "--json").json["steps"][-1]["inputs"]["reward_model"]
    assert judge["ref"] == "meta-llama/Llama-3.2-1B-Instruct"
    monkeypatch.setenv("RL_REWARD_MODEL", "/none/here")
    absent = cli("plan", "rl/nemo_rl/rlhf", "-c", "tiny").err
    assert "'/none/here' is neither" in absent and "hint: export RL_REWARD_MODEL=PATH\n" in absent
    monkeypatch.setenv("RL_REWARD_MODEL", "my/judge")
    for config in ("tiny", "tiny_hybrid", "default", "super3", "small", "test"):  # before the config's own source
        plan = cli("run", "rl/nemo_rl/rlhf", "-c", config, "-d", "--json").json
        assert plan["steps"][-1]["inputs"]["reward_model"]["ref"] == "my/judge" and plan["warnings"] == []
    assert warnings("rl/nemo_rl/rlhf", "-c", "tiny", "--input", "reward_model=my/judge") == [
        "RL_REWARD_MODEL is set, but 'reward_model' of rl/nemo_rl/rlhf is my/judge; "
        '--input reward_model="$RL_REWARD_MODEL" takes it instead'
    ]
    (other,) = warnings("rl/nemo_rl/rlvr", "-c", "tiny")  # which of its configs reads it is for the recipes to say
    assert other.startswith("RL_REWARD_MODEL is set, and nothing in the config of rl/nemo_rl/rlvr reads it (its config")
