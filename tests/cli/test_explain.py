"""`steps explain`: every code and every signal that can be raised is explained, and its example raises it."""

from __future__ import annotations

import re
import shlex
import subprocess
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
def test_an_example_raises_its_error_and_what_mends_it_does_not(cli: Cli, workplace: Path, code: str) -> None:
    entry = explanations()[code]
    shell, *commands = (entry.get("setup") or "true").split("; ")
    subprocess.run(["/bin/sh", "-c", shell], check=True)
    for command in commands:
        assert cli(*shlex.split(command)[1:]).code == 0
    program, *arguments = shlex.split(entry["example"])
    assert program == "steps"
    result = cli(*arguments)
    assert f"error[{code}]" in result.err, result.err
    if "then" in entry:
        _, *arguments = shlex.split(entry["then"])
        mended = cli(*arguments)
        # What doctor finds to be missing on this machine is not an error of the mend.
        assert mended.code == 0 or arguments == ["doctor"], mended.err


def test_a_signal_is_explained_with_what_each_step_advises(cli: Cli) -> None:
    text = cli("explain", "kl_spike").out
    assert "kl_penalty: 12 of 0.01, 0.4" in text
    for field in ("cause", "look", "mend"):
        assert " ".join(explained_signals()["kl_spike"][field].split()) in " ".join(text.split())
    assert re.search(r"loss_fn\.reference_policy_kl_penalty=\S+ .*# rl/nemo_rl/rlhf, rl/nemo_rl/rlvr", text)
    assert cli("explain", "KL-spike").out == text
    advice = cli("explain", "truncation_high", "--json").json["advice"]
    assert any("grpo.overlong_filtering=true" in overrides for overrides in advice)
    assert "steps explain kl_spike" in cli("explain", "kl").err
