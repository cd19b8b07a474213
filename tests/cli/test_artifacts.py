"""`steps artifacts`, and references to artifacts in configs."""

import json
import os
import re
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from nemotron_steps.artifacts.models import Artifact, Edge, Producer
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.cli.run import show_result
from nemotron_steps.cli.terminal import Terminal
from nemotron_steps.manifest.models import StepManifest, StepTable
from nemotron_steps.resolver.plan import Plan, PlannedStep, StepOutput, SuppliedInput
from nemotron_steps.runs.execute import RunResult, StepResult
from nemotron_steps.runs.run_folder import RunFolder
from nemotron_steps.session.publish import without_folders
from nemotron_steps.session.run_request import RunRequest
from tests.artifacts.checkpoint_files import write_hf, write_megatron
from tests.cli.conftest import Cli

MEGATRON_TO_HF = "convert/megatron_to_hf --input checkpoint_megatron="


def test_what_is_added_is_said_shown_and_listed_with_where_it_came_from(cli: Cli, workplace: Path) -> None:
    data = workplace / "data"
    data.mkdir()
    for number in range(23):
        (data / f"{number:02d}.jsonl").write_text('{"x": 1}\n')
    added = cli("artifacts", "add", str(data), "--name", "mine")
    assert added.code == 0 and "--input PORT=mine:v1" in added.out
    again = cli("artifacts", "add", str(data), "--name", "mine", "--json").json
    assert (again["ref"], len(again["files"])) == ("mine:v1", 23)
    shown = cli("artifacts", "show", "mine").out
    assert f"added from {data}" in shown and again["digest"] in shown
    assert "19.jsonl" in shown and "20.jsonl" not in shown and "… 3 more" in shown
    assert cli("artifacts", "show", "mine", "--json").json == again
    (listed,) = cli("artifacts", "list", "--json").json
    assert listed == again
    assert "added from" in cli("artifacts", "list").out


def test_what_is_added_as_a_packs_own_type_is_looked_at_as_what_that_is(cli: Cli, workplace: Path) -> None:
    (workplace / "manifests").mkdir()
    (workplace / "manifests" / "types.toml").write_text('[my_rows]\ndescription = "x"\nis_a = ["training_jsonl"]\n')
    (workplace / "rows.jsonl").write_text("no JSON\n")
    assert cli("artifacts", "add", "rows.jsonl", "--type", "my_rows").code == 2
    (workplace / "rows.jsonl").write_text('{"a": 1}\n')
    assert cli("artifacts", "add", "rows.jsonl", "--type", "my_rows").code == 0


def test_two_productions_show_the_config_and_the_inputs_that_differ(cli, workplace):
    assert cli("run", "toy_all").code == 0
    assert cli("run", "toy_all", "make.count=2", "train.optimizer.lr=0.5").code == 0
    rows = cli("artifacts", "diff", "toy/make/rows:v1", "toy/make/rows:v2")
    assert rows.code == 1
    assert "train.jsonl" in rows.out and "count" in rows.out and "4 → 2" in rows.out
    found = cli("artifacts", "diff", "toy/train/model:v1", "toy/train/model:v2", "--json").json
    assert found["config"] == {"optimizer.lr": [0.1, 0.5]}
    assert found["inputs"] == {"rows": ["toy/make/rows:v1", "toy/make/rows:v2"]}
    assert list(found["files"]) == ["model.json"] and found["same"] is False


ROW = {
    "responses_create_params": {"input": [{"role": "user", "content": "spell tac backwards"}]},
    "agent_ref": {"type": "responses_api_agents", "name": "reasoning_gym_simple_agent"},
    "question": "spell tac backwards",
    "answer": "cat",
    "metadata": {"source_dataset": "spell_backward"},
}


def made(cli: Cli) -> str:
    """Rows of the toy, committed; their name."""
    assert cli("run", "toy/make").code == 0
    return "toy/make/rows"


def add_splits(cli: Cli, workplace: Path, name: str) -> None:
    """Prompts with rows to train and to validate on, as an artifact of that name."""
    folder = workplace / "rows"
    folder.mkdir()
    for split in ("train", "validation"):
        (folder / f"{split}.jsonl").write_text(json.dumps(ROW) + "\n")
    assert cli("artifacts", "add", str(folder), "--type", "rl_prompts", "--name", name).code == 0


@pytest.mark.parametrize("version", ["", ":v1", ":latest", ",path"])
def test_a_reference_at_a_bound_key_feeds_the_input(cli: Cli, workplace: Path, version: str) -> None:
    name = made(cli)
    Path("mine.yaml").write_text(f"defaults: [tiny]\ndata:\n  path: ${{art:{name}{version}}}\n")
    assert cli("run", "toy/train", "-c", "mine.yaml").code == 0
    store = ArtifactStore(workplace / "home")
    (edge,) = store.find("toy/train/model").inputs
    assert (edge.port, edge.digest) == ("rows", store.find(name).digest)
    assert f"rows = {edge.ref}" in cli("artifacts", "show", "toy/train/model").out


def test_splits_of_a_reference_are_those_its_keys_take(cli: Cli, workplace: Path) -> None:
    add_splits(cli, workplace, "super3/data")
    text = "defaults: [tiny]\nrun: {{data: super3/data}}\ndata:\n  train: {{data_path: '${{art:data,{}}}'}}\n"
    Path("mine.yaml").write_text(text.format("train") + "  validation: {data_path: '${art:data,val}'}\n")
    result = cli("plan", "rl/nemo_rl/rlvr", "-c", "mine.yaml", "--json")
    assert result.code == 0, result.err
    inputs = result.json["steps"][-1]["inputs"]
    assert inputs["prompts"]["ref"] == "super3/data:latest"
    assert "validation" not in inputs  # its split is that of the prompts
    Path("mine.yaml").write_text(text.format("val"))
    result = cli("plan", "rl/nemo_rl/rlvr", "-c", "mine.yaml")
    assert result.code == 2
    assert "error[E305]" in result.err and "than its input fills in" in result.err
    assert "data.train.data_path='${art:super3/data:latest}'" in result.err
    Path("mine.yaml").write_text(text.format("train") + "  validation: {data_path: '${art:other,val}'}\n")
    result = cli("plan", "rl/nemo_rl/rlvr", "-c", "mine.yaml")
    assert result.code == 2
    assert "'data.validation.data_path' of rl/nemo_rl/rlvr names something else" in result.err


def test_a_copy_outside_the_home_is_whole_or_not_there_and_replaces_nothing(cli: Cli, workplace: Path) -> None:
    assert cli("artifacts", "add", str(write_megatron(workplace / "model")), "--name", "mine").code == 0
    (place,) = cli("artifacts", "path", "mine").out.splitlines()
    assert sorted(p.name for p in Path(place).iterdir()) == ["artifact.json", "hf", "weights"]
    killed = workplace / f".out.export-{0:032x}"
    killed.mkdir()
    copied = cli("artifacts", "export", "mine", "out")
    assert f"steps artifacts export mine:v1 {workplace / 'out-hf'} --hf" in copied.out and not killed.exists()
    files = {path.relative_to("out") for path in Path("out").rglob("*") if path.is_file()}
    assert files == {path.relative_to("model") for path in Path("model").rglob("*") if path.is_file()}
    refused = cli("artifacts", "export", "mine", "out")
    assert refused.code == 2 and "hf, weights" in refused.err
    assert cli(*re.findall(r"hint: steps (.*)", refused.err)[0].split()).code == 0
    assert (workplace / "out" / "mine-v1" / "hf" / "config.json").is_file()
    weights = Path(place) / "weights" / "__0_0.distcp"
    weights.chmod(0o644)
    old = weights.stat()
    weights.write_bytes(b"\1" * old.st_size)
    assert "is corrupt" in cli("artifacts", "export", "mine", "other").err
    assert not [path.name for path in workplace.iterdir() if "other" in path.name]


def test_of_a_home_elsewhere_there_is_no_folder_but_a_copy(cli: Cli, workplace: Path) -> None:
    (workplace / "rows.jsonl").write_text('{"a": 1}\n')
    home = ("--home", "memory://elsewhere")
    assert cli("artifacts", "add", "rows.jsonl", "--name", "mine", *home).code == 0
    told = cli("artifacts", "path", "mine", *home)
    assert (told.code, told.out) == (2, "") and "steps artifacts export mine:v1 DIR" in told.err
    assert "mine:v1 has no Hugging Face form" in cli("artifacts", "export", "mine", "out", "--hf", *home).err
    assert cli("artifacts", "export", "mine", "out", *home, "--json").json["path"] == str(workplace / "out")
    assert (workplace / "out" / "rows.jsonl").read_text() == '{"a": 1}\n'


SECRET = "hf_" + "aB3dE6gH9jK2mN5pQ8" * 2


@pytest.fixture
def trained(cli: Cli, workplace: Path) -> str:
    """A checkpoint that a run made of a hub model with a licence, and of data of the hub."""
    store = ArtifactStore(workplace / "home")
    snapshot = write_hf(workplace / "models--acme--base-1b" / "snapshots" / "abc123")
    (snapshot / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Base\n")
    base = store.reference(snapshot)
    run = RunFolder(store, "run-1")
    request = RunRequest(
        ("rl/x",), (f"judge.api_key={SECRET}", "n=3", "x='../jane doe/y'"), inputs={"policy": str(snapshot)}
    )
    info = run.create("rl/x", request.to_dict())
    keys = {"data_prep/x": "k1", "rl/x": "k2"}
    run.update(info, steps={step: {"state": "ran", "cache_key": key} for step, key in keys.items()})
    (run.path / "plan.json").write_text(json.dumps({"goals": ["rl/x"], "steps": [{"key": key} for key in keys]}))
    (run.path / "config.yaml").write_text("data_prep/x: {input_path: 'hf://acme/questions'}\n")
    values = {"heldout_reward": {"before": 0.25, "after": 0.75}, "answer": "a text"}
    (run.path / "events.jsonl").write_text(json.dumps({"kind": "summary", "step": "rl/x", "values": values}) + "\n")
    made: list[Edge] = [Edge("policy", base.digest, base.ref)]
    for step, port, kind in (("data_prep/x", "prompts", "training_jsonl"), ("rl/x", "model", "checkpoint_hf")):
        with store.staging() as folder:
            tree = write_hf(folder / "tree", word="b") if kind == "checkpoint_hf" else folder / "tree"
            tree.mkdir(exist_ok=True)
            if port == "prompts":
                (tree / "train.jsonl").write_text('{"question": "of nobody else"}\n')
            inputs = made if port == "model" else []
            producer = Producer(step, port, "run-1", cache_key=keys[step])
            done = store.commit(tree, kind, name=f"{step}/{port}", producer=producer, inputs=inputs)
            made.append(Edge(port, done.digest, done.ref))
    return made[-1].ref


def test_a_card_says_what_a_model_was_made_from_and_no_secret_path_or_row(
    cli: Cli, workplace: Path, trained: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setenv("HF_HOME", str(workplace / "hub"))
    told = cli("publish", trained, "acme/better-1b")
    assert "hf upload acme/better-1b" in told.out and "--private" in told.out, told.err
    card = (workplace / "acme--better-1b" / "README.md").read_text()
    assert (workplace / "acme--better-1b" / "model.safetensors").is_file()
    front = yaml.safe_load(card.split("---\n")[1])
    assert (front["base_model"], front["datasets"]) == ("acme/base-1b", ["acme/questions"])
    for said in (
        "acme/base-1b at revision abc123, licence: apache-2.0",
        "| licence | not recorded |",
        "| heldout_reward | 0.25 → 0.75 (+0.5) |",
        "n=3",
        "--input 'policy=…/abc123'",
        "| hf://acme/questions | not recorded |",
    ):
        assert said in card
    for unsaid in (SECRET, "jane", str(workplace), "of nobody else", "a text"):
        assert unsaid not in card
    assert cli("publish", trained, "acme/better-1b").code == 2
    assert cli("publish", trained, "acme/better-1b", "--folder", "again", "--rows").code == 0
    assert "of nobody else" in (workplace / "again" / "README.md").read_text()


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("/home/jane/x", "…/x"),
        ("policy=/home/jane/x/", "policy=…/x/"),
        ("file:///home/jane/secret/x", "…/x"),
        ("input_path=file://host/home/jane/x", "input_path=…/x"),
        ("~/jane/x", "…/x"),
        ("~jane/m/x", "…/x"),
        ("policy=../jane/x", "policy=…/x"),
        ("./jane/x", "…/x"),
        ("A=/a/b:/c/d/e", "A=…/b:…/e"),
        ("data.path='/home/jane doe/my data/x'", "data.path='…/x'"),
        ("/home/jane o'neill (old)/run=1/x y", "…/x y"),
        ("a=[/a/b, '/c d/e',~jane/f/g]", "a=[…/b, '…/e',…/g]"),
        ("a={path: /a/b, name: acme/questions}", "a={path: …/b, name: acme/questions}"),
        *((same, same) for same in ("hf://acme/questions", "https://a.b:80/v1/x", "toy/make/rows:v1", "lr=1/2", "a=/")),
    ],
)
def test_of_a_path_in_a_value_only_the_last_part_is_shown(value: str, shown: str) -> None:
    assert without_folders(value) == shown


def test_a_model_and_its_card_are_uploaded_in_one_commit_to_a_private_repository(trained: str, workplace: Path) -> None:
    asked: dict[str, bytes] = {}
    held = (".gitattributes", "README.md", "config.json", "model-00001-of-00002.safetensors", "old/x.bin")

    class Hub(BaseHTTPRequestHandler):
        is_private = True

        def do_GET(self) -> None:
            tree = [{"type": "file", "path": path, "oid": "1", "size": 1} for path in held]
            self.answer(tree if "/tree/" in self.path else {"id": "acme/better-1b", "private": self.is_private})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            asked[self.path] = body
            paths = [each["path"] for each in json.loads(body)["files"]] if "preupload" in self.path else []
            files = [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]
            url = f"http://127.0.0.1:{self.server.server_port}/acme/better-1b"
            self.answer({"url": url, "files": files, "commitUrl": url, "commitOid": "1", "errors": [], "warnings": []})

        def answer(self, value: object) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(value).encode())

    def publish() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "nemotron_steps", "publish", trained, "acme/better-1b"]
        hub = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_TOKEN": SECRET, "HF_HUB_OFFLINE": "0"}
        return subprocess.run(command, env={**os.environ, **hub}, capture_output=True, text=True, check=False)

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        done = publish()
        Hub.is_private = False
        commits = asked.pop("/api/models/acme/better-1b/commit/main", b"")
        refused = publish()
        server.shutdown()
    assert done.returncode == 0, done.stderr
    assert json.loads(asked["/api/repos/create"])["visibility"] == "private"
    lines = [json.loads(line) for line in commits.splitlines()]
    written = {line["value"]["path"] for line in lines if line["key"] == "file"}
    assert written >= {"README.md", "model.safetensors", "config.json"}
    assert [line["value"]["path"] for line in lines if line["key"].startswith("deleted")] == [*held[3:]]
    assert refused.returncode == 2 and "--public" in refused.stderr
    assert "/api/models/acme/better-1b/commit/main" not in asked


TAKE = "steps artifacts export x/model:v1 DIR --hf"
GRADE = "steps run eval --input model=x/model:v1 --input 'prompts=my rows.jsonl' 'reward=my rewards.py:f'"


@pytest.mark.parametrize(
    ("kind", "family", "rewards", "commands"),
    [
        ("checkpoint_hf", "qwen3", (), [TAKE, "vllm serve 'my models/a'"]),
        ("reward_model_hf", "nemotron_h", (), [TAKE, "vllm serve 'my models/a'"]),
        ("checkpoint_hf", "gpt2", (), [TAKE]),
        ("checkpoint_megatron", "qwen3", ("grpo.seed=1", "reward=my rewards.py:f"), [GRADE, TAKE, "vllm serve DIR"]),
        ("adapter", "gpt2", ("reward=my rewards.py:f",), [GRADE, TAKE]),
        ("sft_chats", "", (), None),
    ],
)
def test_what_one_may_do_with_a_model_is_said_as_commands(
    kind: str, family: str, rewards: Any, commands: Any, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Artifact(kind, "d", workplace / "my models" / "a", {"model_type": family}, name="x/model", version=1)
    step = StepResult("x", "x", "ran", {"model": made}, 1.0)

    def planned(key: str, overrides: Any, inputs: Any) -> PlannedStep:
        manifest = StepManifest(step=StepTable(id=key))
        return PlannedStep(key, key, manifest, "", overrides, {}, inputs, {}, key == "import")

    imported = planned("import", (), {"dataset": SuppliedInput("my rows.jsonl")})
    plan = Plan((imported, planned("x", rewards, {"prompts": StepOutput("import", "prompts")})), ("x",))
    show_result(RunResult("r", workplace, (step,), 1.0), plan, Terminal.of())
    after = [line.strip() for line in capsys.readouterr().out.partition("next\n")[2].splitlines()]
    lineage = "steps artifacts lineage x/model:v1"
    assert after == ([lineage, f"steps list --consumes {kind}"] if commands is None else [*commands, lineage])
