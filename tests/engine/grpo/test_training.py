"""What the GRPO steps put around the loop: environments from start to end, held-out prompts graded beside grpo."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from nemotron_steps.environments import registry
from nemotron_steps.environments.base import GradeResult, Response, Session
from nemotron_steps.runs.context import Tracker
from nemotron_steps.steps import grpo
from tests.engine.grpo.grpo_environments import Vowels
from tests.engine.grpo.grpo_runs import config_of


class Noted(Vowels):
    """Notes what happens to it, and on which event loop."""

    name = "noted"
    notes: list[tuple[str, asyncio.AbstractEventLoop]] = []  # noqa: RUF012

    def note(self, what: str) -> None:
        self.notes.append((what, asyncio.get_running_loop()))

    async def start(self) -> None:
        self.note("start")

    async def verify(self, row, response: Response, session: Session) -> GradeResult:
        self.note("verify")
        return await super().verify(row, response, session)

    async def close(self) -> None:
        self.note("close")


@pytest.fixture
def context(task, tmp_path, monkeypatch):
    """A step of four prompts; one held-out prompt graded by another environment."""
    monkeypatch.setitem(registry.BUILT_IN, "noted", f"{__name__}:Noted")
    monkeypatch.setattr(Noted, "notes", [])
    config = config_of(
        task,
        1,
        data__heldout__data_path=str(task / "train.jsonl"),
        heldout__environment="noted",
        heldout__max_prompts=1,
        heldout__samples_per_prompt=1,
    )
    outputs = {"model": SimpleNamespace(path=tmp_path / "model", type="checkpoint_megatron")}
    (tmp_path / "model").mkdir()
    tracker = Tracker("test", None, None)
    given = {"config": config, "inputs": {}, "outputs": outputs, "work": tmp_path, "tracker": tracker}
    return SimpleNamespace(**given, started=time.monotonic())


def test_an_environment_of_heldout_prompts_alone_is_started_and_lives_on_one_event_loop(context):
    grpo.run_grpo(context)
    assert [what for what, _ in Noted.notes] == ["start", "verify", "verify", "close"]
    assert len({loop for _, loop in Noted.notes}) == 1
