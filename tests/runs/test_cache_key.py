"""Everything that a config can name is part of the cache key: each is edited, and the plan says what changed."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import nemotron_steps
from nemotron_steps.artifacts.models import Producer
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.config.schema.rl import RlConfig
from nemotron_steps.config.validation import default_of
from nemotron_steps.resolver.plan import Plan, PlannedStep, SuppliedInput
from nemotron_steps.runs.cache import CacheEntry, remember, with_cached
from nemotron_steps.runs.cache_key import depends_on, key_of, recorded
from nemotron_steps.runs.step_workdir import open_input
from nemotron_steps.session.run_request import RunRequest
from nemotron_steps.session.session import Session

TRAIN, EVALUATE, PREPARE = "rl/nemo_rl/rlvr", "eval/model_eval", "data_prep/rl_prep"
PACKAGE = Path(nemotron_steps.__file__).parent
FILES = {
    # the user's own
    "rewards.py": "import json, numpy\nimport helper\nfrom lib import one\n"
    "if json: import scratch.part\nopen('answers.json')\nopen('seen.txt', 'a')\n"
    "LOG = Path('own.log')\nLOG.open('w')\nopen('catalog.json')  # changelog\nopen('names')\nopen('rules/other.md')\n"
    "for each in (HERE / 'rules').glob('*.txt'): row['output']\nlistdir('words')\n"
    "import_module(f'{name}')\nsave(load('saved.npy'))\n",
    "helper.py": "def f():\n    from deeper import (\n        x,\n    )\n",
    "deeper.py": "import importlib\nx = importlib.import_module('called')\n",
    "called.py": "",
    "answers.json": "{}",
    "catalog.json": "",
    "seen.txt": "",
    "saved.npy": "",
    "own.log": "",
    "names": "",
    "rules/one.txt": "",
    "rules/other.md": "",
    "words/deep/one": "",
    "words/.hidden": "",
    "lib/tables/one.csv": "",
    "tables/two.csv": "",
    "lib/one.py": "try: from .two import *\nexcept ImportError: pass\nfor each in glob('tables/*.csv'): 1\n"
    "sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', 'beside'))\nimport next_door",
    "beside/next_door.py": "",
    "lib/two.py": "import sys; sys.path.append('elsewhere'); import placed",
    "lib/elsewhere/placed.py": "",
    "unused.py": "",
    "judge/config.json": "{}",
    "judge/tokenizer/tokenizer.json": "{}",
    "templates/judge.jinja": "{{ text }}",
    "words.txt": "",
    "tokens/tokenizer.json": "{}",
    "tokens/model.safetensors": "",
    "adapter/adapter_model.safetensors": "",
    "adapter/__pycache__/x.pyc": "",
    "output/report.txt": "",
    "rows.jsonl": '{"responses_create_params": {"input": "2+2"}, "agent_ref": {"name": "by_row_simple_agent"}}\n',
    # installed
    "site/scratch/__init__.py": "",
    "site/scratch/part.py": "",
    "site/scratch_dist-1.0.dist-info/RECORD": "scratch/__init__.py,,\nscratch/part.py,,\n",
    "site/scratch_dist-1.0.dist-info/METADATA": "Name: scratch-dist\nVersion: 1.0\n\nVersion: 7\n",
    "site/plugin/env.py": "from . import rules\nfrom plugin_core import base\nimport scratch\nopen('prompt.txt')\n",
    "site/plugin/__init__.py": "",
    "site/plugin/rules.py": "TABLE = 'plugin.table:Table'",
    "site/plugin/table.py": "",
    "site/plugin/prompt.txt": "",
    "site/plugin/unused.py": "",
    "site/plugin_core/base.py": "",
    "site/plugin-1.0.dist-info/RECORD": "plugin/__init__.py,,\nplugin_core/base.py,,\n",
    "site/plugin-1.0.dist-info/METADATA": "Name: plugin\nVersion: 1.0\n",
    "site/plugin-1.0.dist-info/entry_points.txt": "[nemotron_steps.environments]\nplugin = plugin.env:Env\n",
    "site/agents/by_config.py": "",
    "site/agents/by_row.py": "",
    "site/agents/not_named.py": "",
    "site/agents-1.0.dist-info/METADATA": "Name: agents\nVersion: 1.0\n",
    "site/agents-1.0.dist-info/entry_points.txt": "[nemotron_steps.environments]\nby_config = agents.by_config:Env\n"
    "by_row = agents.by_row:Env\nnot_named = agents.not_named:Env\n",
    "site/scorers/deep/judge.py": "",
    "site/scorers/deep/__init__.py": "",
    "site/scorers/rewards.py": "",
    "site/chosen.py": "",
}
ENVIRONMENTS = {
    "reward_function": {"functions": [{"function": "rewards.py:score"}, {"function": "scorers.rewards:score"}]},
    "plugin": {
        "prompt_template": "templates/judge.jinja",
        "word_lists": ["words.txt", "not_here.txt"],
        "tokenizer": "tokens",
        "adapter": "adapter",
        "output_dir": "output",
        "scorer": "scorers.deep.judge.Scorer",
        "_target_": "chosen.Class",
        "answer_key": "gold",
        "api_key": "sk-a-credential",
    },
    "my_agent": {"environment": "by_config"},
}
SETTINGS = "env.nemo_gym.environments"


def of_plugin(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return changed("env", "nemo_gym", "environments", "plugin", key, value)


def changed(*path: Any) -> Callable[[dict[str, Any]], None]:
    """An edit of the config: the last of the path is the new value."""

    def edit(config: dict[str, Any]) -> None:
        *parents, last, value = path
        for name in parents:
            config = config[name]
        config[last] = value

    return edit


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the files, some of them on sys.path, and a copy of the package."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PlannedStep]:
    """Real steps whose configs name all of it."""
    bench = Session(home=str(tmp_path_factory.mktemp("home")))
    asked = [RunRequest(targets=(step,), config="tiny") for step in (TRAIN, EVALUATE, PREPARE)]
    found = {each.step_id: each for one in asked for each in bench.plan(one)}
    for step in (TRAIN, EVALUATE):
        config = json.loads(json.dumps(found[step].config))
        config["env"]["nemo_gym"]["environments"] = ENVIRONMENTS
        config["env"]["nemo_gym"]["judge_model"] = {"responses_api_models": {"vllm_model": {"model": "./judge"}}}
        inputs = {"prompts": SuppliedInput("rows.jsonl", "rl_prompts")}
        found[step] = replace(found[step], config=json.loads(json.dumps(config)), inputs=inputs)
    return found


def made(store: ArtifactStore, step: PlannedStep, version: str = "0.0.9") -> str:
    """Record that a step was made as it is planned now; its key."""
    rows = {port: open_input(step, port, source, store) for port, source in step.inputs.items()}
    depends = depends_on(step, rows)  # type: ignore[arg-type]
    with store.staging() as folder:
        (folder / "tree").mkdir()
        (folder / "tree" / "report.json").write_text('{"metrics": {"x": 1}}')
        producer = Producer(step.step_id, "report", "run", cache_key=key_of(depends))
        name = f"{step.step_id}/{next(iter(step.produces))}"
        artifact = store.commit(folder / "tree", "eval_report", name=name, producer=producer)
    outputs = {"report": artifact}
    remember(store, CacheEntry(key_of(depends), "run", 1.0, outputs, {}, version, recorded(depends, step)))
    return key_of(depends)


def looked_at(store: ArtifactStore, step: PlannedStep) -> PlannedStep:
    return with_cached(Plan((step,), (step.key,)), store).steps[0]


def rows_of(step: str, *rows: tuple[Any, str | None]) -> list[Any]:
    return [pytest.param(step, *row, id=f"{step} {row[0] if isinstance(row[0], str) else row[1]}") for row in rows]


SAID = [
    *rows_of(
        TRAIN,
        # the config
        (changed("env", "nemo_gym", "thinking_tags", ["<a>", "</think>"]), "config env.nemo_gym.thinking_tags"),
        (of_plugin("answer_key", "silver"), f'config {SETTINGS}.plugin.answer_key: "gold" -> "silver"'),
        (of_plugin("api_key", "sk-another"), None),
        (of_plugin("word_lists", ["words.txt", "nor_here.txt"]), f"config {SETTINGS}.plugin.word_lists.1"),
        # the user's files, by any key
        ("rewards.py", "file rewards.py"),
        ("helper.py", "file helper.py"),
        ("deeper.py", "file deeper.py"),
        ("seen.txt", None),
        ("own.log", None),
        ("saved.npy", "file saved.npy"),
        ("rules/one.txt", "file *.txt"),
        ("words/deep/one", "file words/"),
        ("words/.hidden", None),
        ("lib/tables/one.csv", "file lib/*.csv"),
        ("tables/two.csv", "file lib/*.csv"),
        ("beside/next_door.py", "file next_door.py"),
        ("lib/elsewhere/placed.py", "file placed.py"),
        ("unused.py", "file unused.py"),  # which import_module may import
        ("site/scorers/deep/judge.py", "code: scorers/deep/judge.py"),
        ("site/chosen.py", "code: chosen.py"),
        ("judge/config.json", "file env.nemo_gym.judge_model.responses_api_models.vllm_model.model"),
        ("templates/judge.jinja", f"file {SETTINGS}.plugin.prompt_template"),
        ("tokens/model.safetensors", None),
        ("adapter/adapter_model.safetensors", f"file {SETTINGS}.plugin.adapter"),
        ("adapter/__pycache__/x.pyc", None),
        ("output/report.txt", None),
        ("rows.jsonl", "input prompts"),
        # other packages
        ("site/plugin/env.py", "code: plugin/env.py"),
        ("site/plugin/rules.py", "code: plugin/rules.py"),
        ("site/plugin/table.py", "code: plugin/table.py"),
        ("site/plugin/prompt.txt", "code: plugin/prompt.txt"),
        ("site/plugin_core/base.py", "code: plugin_core/base.py"),
        ("site/plugin/unused.py", None),
        ("site/agents/by_config.py", "code: agents/by_config.py"),
        ("site/agents/by_row.py", "code: agents/by_row.py"),
        ("site/agents/not_named.py", None),
        ("site/scratch/part.py", None),
        ("site/scratch_dist-1.0.dist-info/METADATA", "code: distribution scratch-dist: 1.0 -> 1.0.1"),
        # this package
        ("nemotron_steps/engine/rollouts/conversation.py", "code: engine/rollouts/conversation.py"),
        ("nemotron_steps/engine/kernels/attention.c", "code: engine/kernels/attention.c"),
        ("nemotron_steps/environments/custom_reward.py", "code: environments/custom_reward.py"),
        ("nemotron_steps/environments/text/mcqa.py", None),
        ("nemotron_steps/runs/report/page.py", None),
        ("nemotron_steps/runs/execute.py", None),
        ("nemotron_steps/artifacts/store.py", None),
        ("nemotron_steps/__init__.py", None),
    ),
    *rows_of(
        EVALUATE,
        ("helper.py", "file helper.py"),
        ("site/plugin/rules.py", "code: plugin/rules.py"),
        ("words.txt", f"file {SETTINGS}.plugin.word_lists.0"),
        ("site/agents/by_row.py", None),  # its rows all go to evaluation.environment
        ("nemotron_steps/engine/supervised/training.py", None),
    ),
    *rows_of(
        PREPARE,
        ("site/agents/by_row.py", "code: agents/by_row.py"),  # it checks rows that nobody has read yet
        ("nemotron_steps/rows/messages.py", "code: rows/messages.py"),
        ("nemotron_steps/environments/text/mcqa.py", "code: environments/text/mcqa.py"),
        ("nemotron_steps/artifacts/lineage.py", None),
        ("nemotron_steps/engine/losses/policy_gradient.py", None),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("step", "edit", "said"), SAID)
def test_an_edit_is_seen_and_said(
    step: str,
    edit: Any,
    said: str | None,
    steps: dict[str, PlannedStep],
    world: Path,
    store: ArtifactStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = steps[step]
    if isinstance(edit, str) and edit.startswith("nemotron_steps/"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(PACKAGE, world / "nemotron_steps", ignore=ignored)
        monkeypatch.setattr(nemotron_steps, "__path__", [str(world / "nemotron_steps")])
    made(store, before)
    assert looked_at(store, before).cached is not None
    config = json.loads(json.dumps(before.config))
    if not isinstance(edit, str):
        edit(config)
    elif edit.endswith("METADATA"):
        (world / edit).write_text(FILES[edit].replace("1.0", "1.0.1"))
        (world / edit).parent.rename((world / edit).parent.with_name("scratch_dist-1.0.1.dist-info"))
    elif edit.endswith(".jsonl"):
        (world / edit).write_text(FILES[edit].replace("2+2", "3+3"))
    else:
        times = (world / edit).stat()
        (world / edit).write_bytes((world / edit).read_bytes() + b"\n")
        os.utime(world / edit, ns=(times.st_atime_ns, times.st_mtime_ns))
    after = looked_at(store, replace(before, config=config))
    if said is None:
        assert after.cached is not None, after.changes
    else:
        assert after.changes is not None and after.cached is None
        assert [line.startswith(said) for line in after.changes.differences] == [True], after.changes
        assert bool(after.changes.code) is said.startswith("code: ")


@pytest.mark.parametrize(
    ("key", "then", "now", "said"),
    [
        ("max_rollout_turns", ..., 999, "config grpo.max_rollout_turns: not set -> 999"),
        ("val_period", ..., "DEFAULT", "code: config grpo.val_period: not set -> -1"),
        ("a_key_of_then", 5, ..., "code: config grpo.a_key_of_then: 5 -> not set"),
        ("seed", 5, ..., "config grpo.seed: 5 -> not set"),
    ],
)
def test_a_key_that_the_config_model_has_got_or_lost_is_changed_code(
    key: str, then: Any, now: Any, said: str, steps: dict[str, PlannedStep], world: Path, store: ArtifactStore
) -> None:
    def with_key(value: Any) -> PlannedStep:
        config = json.loads(json.dumps(steps[TRAIN].config))
        config["grpo"].pop(key, None)
        default = default_of(RlConfig, f"grpo.{key}")
        config["grpo"] |= {} if value is ... else {key: default if value == "DEFAULT" else value}
        return replace(steps[TRAIN], config=config)

    made(store, with_key(then))
    changes = looked_at(store, with_key(now)).changes
    assert changes is not None and changes.differences == (said,)
    assert bool(changes.code) is said.startswith("code: ")


def test_what_is_kept_of_a_mapping_has_no_secret_and_tells_that_one_changed(
    steps: dict[str, PlannedStep], world: Path, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_url(password: str) -> PlannedStep:
        config = json.loads(json.dumps(steps[TRAIN].config))
        plugin = config["env"]["nemo_gym"]["environments"]["plugin"]
        plugin |= {"url": f"https://user:{password}@host/v1", "variable": "a-content-of-HF_TOKEN"}
        return replace(steps[TRAIN], config=config)

    monkeypatch.setenv("HF_TOKEN", "a-content-of-HF_TOKEN")
    key = made(store, with_url("hunter22"))
    kept = (world / f"home/artifacts/steps/{key}.json").read_text()
    assert not [secret for secret in ("hunter22", "a-content-of", "sk-a-credential") if secret in kept]
    changes = looked_at(store, with_url("hunter23")).changes
    assert changes is not None and changes.differences == ("config: a value that is not shown",)
    monkeypatch.delenv("HF_TOKEN")  # what is masked depends on the process, the key does not
    assert looked_at(store, with_url("hunter22")).cached is not None
