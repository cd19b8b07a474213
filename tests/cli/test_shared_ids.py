"""A pack in the public layout beside the built-in one: its steps are listed, shown and planned, ours run as before."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.manifest.public_pack import SHARED, public_pack


@pytest.fixture
def public(workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = public_pack(tmp_path)
    monkeypatch.setenv("STEPS_PATH", str(root))
    return root


def test_every_public_step_is_listed_and_shown(cli: Cli, public: Path) -> None:
    rows = [row for row in cli("list", "--json").json["steps"] if row["pack"] == "public"]
    assert len(rows) == 24
    for row in rows:
        shown = cli("show", row["id"])
        assert shown.code == 0 and "can be planned, not run" in shown.out, row["id"]
        assert "The public one of" in shown.out
    assert {row["id"] for row in rows} >= {f"public:{step_id}" for step_id in SHARED}
    ours = cli("show", "nemotron_steps:sft/automodel")
    assert ours.out == cli("show", "sft/automodel").out and "Public" not in ours.out
    # Its own configs, not those of the built-in step of that id.
    assert cli("show", "public:rl/nemo_rl/rlhf", "--json").json["configs"].keys() == {"default", "tiny"}


def test_the_main_job_plans_as_without_the_pack(
    cli: Cli, public: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    command = ("plan", "rl/nemo_rl/rlhf", "-c", "tiny", "--json")
    beside = cli(*command).json
    monkeypatch.delenv("STEPS_PATH")
    alone = cli(*command).json
    assert beside["steps"] == alone["steps"] and alone["warnings"] == []
    assert beside["warnings"] == [
        "rl/nemo_rl/rlhf is that of pack nemotron_steps; there is also public:rl/nemo_rl/rlhf"
    ]


def test_a_step_without_an_implementation_is_planned_and_says_so_on_run(
    cli: Cli, public: Path, workplace: Path
) -> None:
    rows = workplace / "rows.jsonl"
    rows.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
    asked = ("curate/filter", "public:sft/automodel", "--input", f"curate/filter.training_jsonl={rows}")
    asked = (*asked, "--input", "checkpoint_hf=some/model")
    plan = cli("plan", *asked, "--json")
    assert plan.code == 0, plan.out
    assert [step["step"] for step in plan.json["steps"]] == ["curate/filter", "public:sft/automodel"]
    assert plan.json["steps"][1]["inputs"]["training_jsonl"] == {"step": "curate/filter", "port": "filtered_jsonl"}
    refused = cli("run", *asked)
    assert refused.code == 2
    for step in ("curate/filter", "public:sft/automodel"):
        assert f"step '{step}' has no implementation here" in refused.err
    assert cli("runs", "--json").json == []


@pytest.mark.parametrize(("step", "config"), [("sft/megatron_bridge", "default"), ("rl/nemo_rl/rlhf", "tiny")])
def test_a_config_written_for_another_tool_stops_no_plan_of_its_ports(
    cli: Cli, public: Path, workplace: Path, step: str, config: str
) -> None:
    (workplace / "shards").mkdir()
    (workplace / "shards" / "x.parquet").write_bytes(b"PAR1")
    ports = cli("show", f"public:{step}", "--json").json["consumes"]
    given = {"packed_parquet": "./shards", "checkpoint_hf": "some/model", "checkpoint_megatron": "a:v1"}
    inputs = [f"--input={port['name']}={given[port['name']]}" for port in ports if port["name"] in given]
    found = cli("plan", f"public:{step}", "-c", config, *inputs, "--json").json
    if step == "sft/megatron_bridge":
        assert any("cannot be read" in warning for warning in found["warnings"])
        assert [planned["step"] for planned in found["steps"]] == [f"public:{step}"]
    else:  # nothing feeds its prompts: that, and an artifact that is not there, are all that is wrong
        assert {problem["code"] for problem in found["error"]["problems"]} == {"E303", "E400"}


def test_configs_of_a_pack_belong_to_its_own_step_of_that_id(
    cli: Cli, workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "mine"
    manifest = (Path(__file__).parent / "toy_pack/manifests/toy/make.toml").read_text()
    (root / "manifests").mkdir(parents=True)
    (root / "manifests/make.toml").write_text(manifest.replace("toy/make", "data_prep/rl_prep"))
    (root / "configs/data_prep/rl_prep").mkdir(parents=True)
    (root / "configs/data_prep/rl_prep/three.yaml").write_text("count: 3\n")
    types = '[toy_rows]\ndescription = "Rows"\n'
    (root / "manifests/types.toml").write_text(types)
    monkeypatch.setenv("STEPS_PATH", str(root))
    mine = cli("run", "mine:data_prep/rl_prep", "-c", "three", "--json")
    assert mine.code == 0, mine.err
    assert mine.json["steps"][0]["outputs"]["rows"]["ref"] == "mine/data_prep/rl_prep/rows:v1"
    ours = cli("plan", "data_prep/rl_prep", "-c", "three")
    assert ours.code == 2 and "has no config 'three'" in ours.err
    borrowed = cli("plan", "mine:data_prep/rl_prep", "-c", "tiny")
    assert borrowed.code == 2 and "has no config 'tiny'" in borrowed.err
