"""What `steps env` prints for people, whom it asks to judge, and how it serves."""

from __future__ import annotations

import io
import signal
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from nemotron_steps.cli import environment_commands
from nemotron_steps.cli.environment_commands import _judges, _print_verified, _short, _show, serve_environment
from nemotron_steps.cli.terminal import Terminal
from nemotron_steps.environments.base import Verdict
from nemotron_steps.environments.catalog import Described, Setting
from nemotron_steps.environments.recorded import Regraded


def lines_of(show: Any, *given: Any) -> list[str]:
    text = io.StringIO()
    show(*given, Terminal(text, color=False, width=None))
    return [" ".join(line.split()) for line in text.getvalue().splitlines()]


def described(**changes: Any) -> Described:
    plain = Described(
        *("mcqa", "mcqa", {}, None, "Grades a letter.\n\n  \n\nBy its box.", "built-in", (0.0, 1.0), ("a", "b.c")),
        *((), False, False, (), ()),
    )
    return replace(plain, **changes)


def test_an_environment_is_shown_with_what_is_so_and_nothing_else() -> None:
    assert lines_of(_show, described()) == [
        "mcqa built-in",
        *("Grades a letter.", "By its box."),
        *("reward 0 to 1", "rows need a, b.c"),
        *("settings (env.nemo_gym.environments.mcqa.KEY)", "none"),
    ]


def test_an_agent_is_shown_with_where_it_leads_and_everything_that_it_brings() -> None:
    settings = (Setting("url", "str", None, True, "where"), Setting("limit", "int", 0, False, ""))
    shown = described(
        asked="my_agent", preset={"strict": True}, needs="a server", reward_range=None, judges=("j", "k"),
        judges_groups=True, runs_agent=True, settings=settings, agents=("x", "y"),
    )  # fmt: skip
    assert lines_of(_show, shown)[0] == "my_agent → mcqa built-in"
    assert lines_of(_show, shown)[3:] == [
        *("reward see the settings", "rows need a, b.c", "asks j, k", "judges the rollouts of a prompt together"),
        *("runs whole rollouts against the policy's endpoint", "needs a server", "agents x, y", "preset strict = true"),
        *("settings (env.nemo_gym.environments.my_agent.KEY)", "url required where", "limit = 0"),
    ]


def graded(recorded: float | None, reward: float | None) -> Regraded:
    return Regraded("r.jsonl:1", recorded, Verdict(reward, failure="no_judge" if reward is None else None))


def test_means_are_of_the_rollouts_that_have_both_rewards() -> None:
    found = [graded(1.0, 0.5), graded(0.0, 0.0), graded(None, 1.0), graded(0.25, None)]
    different = [each for each in found if not each.agrees(0)]
    assert lines_of(_print_verified, found, different) == [
        "✗ r.jsonl:1 recorded 1, here 0.5",
        "✗ r.jsonl:1 recorded none, here 1",
        "✗ r.jsonl:1 recorded 0.25, here not judged (no_judge)",
        *("rollouts 4", "same reward 1 of 4", "not judged here 1", "mean reward recorded 0.5, here 0.25"),
    ]
    assert lines_of(_print_verified, [graded(None, 1.0)], []) == ["rollouts 1", "same reward 1 of 1"]


@pytest.mark.parametrize(("count", "more"), [(20, None), (21, "… 1 more")])
def test_differences_beyond_the_twentieth_are_counted(count: int, more: str | None) -> None:
    found = [graded(1.0, 0.0)] * count
    lines = lines_of(_print_verified, found, found)
    assert lines.count("✗ r.jsonl:1 recorded 1, here 0") == 20
    assert [line for line in lines if "more" in line] == ([more] if more else [])


def test_a_long_detail_is_cut_and_a_number_is_short() -> None:
    assert _short("a\n b") == "a b" and _short(1 / 3) == "0.3333" and _short("x" * 160) == "x" * 160
    assert _short("x" * 161) == "x" * 157 + "..."


@pytest.fixture
def asked_models(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """Which endpoints were asked for their models; judges are what they were made of."""
    asked: list[tuple[str, str | None]] = []
    module = "nemotron_steps.environments.judged.judges"
    monkeypatch.setattr(f"{module}.served_model", lambda url, key: asked.append((url, key)) or "listed")
    monkeypatch.setattr(f"{module}.HttpJudge", lambda url, model, *, api_key_env: (url, model, api_key_env))
    return asked


def judges_of(*words: str, model: str | None = None, key: str | None = None) -> dict[str, Any]:
    return _judges(SimpleNamespace(judge=list(words), judge_model=model, judge_key=key))


def test_an_endpoint_plays_every_role_that_no_other_was_named_for(asked_models: list[Any]) -> None:
    found: Any = judges_of("http://a/v1?x=y", "judge_model=http://b/v1", key="KEY")
    assert {role: judge[0] for role, judge in found.items()} == {
        "genrm_model": "http://a/v1?x=y",
        "judge_model": "http://b/v1",
        "safety_model": "http://a/v1?x=y",
    }
    assert asked_models == [("http://a/v1?x=y", "KEY"), ("http://b/v1", "KEY")]
    assert found["judge_model"][1:] == ("listed", "KEY") and found["genrm_model"] is found["safety_model"]
    assert judges_of() == {}


def test_a_model_that_is_named_is_not_asked_for(asked_models: list[Any]) -> None:
    assert judges_of("judge_model=http://b/v1", model="mine") == {"judge_model": ("http://b/v1", "mine", None)}
    assert asked_models == []


@pytest.mark.parametrize(("asked", "agent"), [("mcqa", None), ("my_agent", "my_agent")])
def test_an_environment_is_served_as_asked_until_a_signal_comes(
    asked: str, agent: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[Any] = []

    class Server:
        url = "http://127.0.0.1:9"

        def __init__(self, environment: Any, **given: Any) -> None:
            made.append(given)

        def __enter__(self) -> Server:
            return self

        def __exit__(self, *_: object) -> None:
            made.append("closed")

    before = signal.getsignal(signal.SIGTERM)
    tell = environment_commands._tell_url

    def told(url: str, environment: Any, *, as_json: bool) -> None:
        tell(url, environment, as_json=as_json)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("nemotron_steps.environments.remote.serving.EnvironmentServer", Server)
    monkeypatch.setattr(environment_commands, "_created", lambda arguments: SimpleNamespace(name="mcqa"))
    monkeypatch.setattr(environment_commands, "_tell_url", told)
    given = {"host": "0.0.0.0", "port": 7, "model_url": "http://m/v1", "group_size": 4}
    assert serve_environment(SimpleNamespace(environment=asked, as_json=False, **given)) == 0
    assert made == [{**given, "agent": agent}, "closed"] and signal.getsignal(signal.SIGTERM) is before
    assert "mcqa  http://127.0.0.1:9" in capsys.readouterr().out
