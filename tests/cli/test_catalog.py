"""`steps list`, `show`, `types`, `explain`: what there is."""

import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import nemotron_steps
from nemotron_steps.cli.catalog import explained_signals, explanations
from nemotron_steps.engine.signals import RULES, SignalMonitor
from nemotron_steps.errors import StepsError
from nemotron_steps.manifest.packs import PackSearch, builtin_pack_root, open_pack
from nemotron_steps.manifest.registry import load_registry
from tests.cli.conftest import Cli
from tests.manifest.public_pack import public_pack


def test_a_broken_manifest_is_mentioned_and_the_rest_works(cli, workplace):
    broken = workplace / "manifests"
    broken.mkdir()
    (broken / "bad.toml").write_text('[step]\nid = "toy/bad"\nentry = "no colon"\n[[produces]]\ntype = "toy_rows"\n')
    result = cli("list", "--tag", "toy")
    assert result.code == 0
    assert "toy/make" in result.out
    assert "1 manifest problem, not listed" in result.err
    shown = cli("show", "toy/bad")
    assert shown.code == 2
    assert "bad.toml:3" in shown.err


for module in ("nemotron_steps.cli.parser", "nemotron_steps.resolver.problems"):
    import_module(module)
EXAMPLES = [code for code, entry in explanations().items() if "example" in entry]


def classes(root: type[StepsError] = StepsError) -> Iterator[type[StepsError]]:
    yield root
    for each in root.__subclasses__():
        if each.__module__.startswith("nemotron_steps."):
            yield from classes(each)


def test_every_code_in_the_package_is_explained_and_no_other() -> None:
    """Codes of classes, and any that the source writes out: there are classes that nobody imports here."""
    root = Path(nemotron_steps.__file__).parent
    texts = [re.sub("# noqa.*", "", file.read_text()) for file in root.rglob("*.py")]
    written = {code for text in texts for code in re.findall(r"\bE\d{3}\b", text)}
    assert {each.code for each in classes()} <= written
    assert set(explanations()) == written


def test_every_signal_is_explained_and_no_other() -> None:
    built_in = load_registry(PackSearch((open_pack(builtin_pack_root(), "nemotron_steps", "built-in"),)))
    strategies = [each for step in built_in.steps.values() for each in step.strategies]
    answered = {signal for strategy in strategies for signal in strategy.signal}
    assert set(explained_signals()) == {*RULES, "out_of_memory"} >= answered


def values(told: str) -> list[float]:
    """`12 of 0.01, 0.4` as thirteen numbers."""
    found: list[float] = []
    for part in told.split(", "):
        count, _, value = part.rpartition(" of ")
        found += [float(value)] * int(count or 1)
    return found


@pytest.mark.parametrize("signal", RULES)
def test_an_example_raises_its_signal_at_its_last_step(signal: str) -> None:
    entry = explained_signals()[signal]
    series = {metric: values(told) for metric, told in entry["example"].items()}
    monitor = SignalMonitor(max_policy_lag=1)
    raised = [
        [each.name for each in monitor.update(step, dict(zip(series, row, strict=True)))]
        for step, row in enumerate(zip(*series.values(), strict=True))
    ]
    assert signal in raised[-1]
    assert not any(signal in names for names in raised[:-1])


@pytest.mark.parametrize("code", EXAMPLES)
def test_an_example_raises_its_error(cli: Cli, workplace: Path, code: str) -> None:
    program, *arguments = shlex.split(explanations()[code]["example"])
    assert program == "steps"
    result = cli(*arguments)
    assert f"error[{code}]" in result.err, result.err


@pytest.fixture
def public(workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = public_pack(tmp_path)
    monkeypatch.setenv("STEPS_PATH", str(root))
    return root


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
    other = cli("plan", "public:sft/megatron_bridge", "--input", f"packed_parquet={rows}", "--json")
    assert other.code == 0 and "megatron_bridge, which has no implementation" in other.json["warnings"][0], other.out
    (note,) = cli("plan", "sft/automodel", "-c", "tiny", "--input", f"chats={rows}", "--json").json["warnings"]
    assert note == "sft/automodel is that of pack nemotron_steps; there is also public:sft/automodel"


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
