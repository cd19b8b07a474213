"""What becomes of a group's sessions, and of rows that cannot be sampled."""

import asyncio

from nemotron_steps.engine.rollouts.data import PromptRow, read_rows
from nemotron_steps.environments import registry
from nemotron_steps.environments.base import Session
from nemotron_steps.errors import SandboxError
from tests.engine.engine_samples import ends_in_a_tool_result
from tests.engine.grpo.grpo_environments import Vowels
from tests.engine.grpo.grpo_runs import config_of, start


class ThreeSessions(Vowels):
    """Has room for three sessions at a time."""

    name = "three_sessions"
    open: set[int] = set()  # noqa: RUF012

    async def seed(self, row) -> Session:
        if len(self.open) == 3:
            raise SandboxError("no room")
        session = Session()
        self.open.add(id(session))
        return session

    async def release(self, session: Session) -> None:
        self.open.remove(id(session))


def test_sessions_are_released_when_one_of_their_group_cannot_be_opened(task, tmp_path, monkeypatch):
    monkeypatch.setitem(registry.BUILT_IN, "three_sessions", f"{__name__}:ThreeSessions")
    run = start(config_of(task, 1, environment="three_sessions"), tmp_path)
    prompts = read_rows(task / "train.jsonl")[:1]
    (group,) = asyncio.run(run.collector.collect(prompts, group_ids=["a"], num_generations=3))
    assert len(group.rollouts) == 3 and not ThreeSessions.open
    (group,) = asyncio.run(run.collector.collect(prompts, group_ids=["b"], num_generations=4))
    assert [r.failure for r in group.rollouts] == [None, None, None, "seed_failed"] and not ThreeSessions.open
    assert "SandboxError" in group.rollouts[3].metadata["message"]


def test_a_prompt_is_shown_as_the_policy_saw_it(task, tmp_path):
    run = start(config_of(task, 1, policy__max_total_sequence_length=256), tmp_path)
    row = {**read_rows(task / "train.jsonl")[0].row, "responses_create_params": {"input": ends_in_a_tool_result("3+4")}}
    (group,) = asyncio.run(run.collector.collect([PromptRow(0, row, "row")], group_ids=["a"], num_generations=2))
    text = run.collector.shown(group.rollouts[0])["prompt"]
    assert text.index("3+4") < text.index("seven")
    assert text.startswith("<|im_start|>user") and text.endswith("<|im_start|>assistant\n")  # as a report shows it
    assert "<|im_start|>" not in run.collector.shown(group.rollouts[0], whole=False)["prompt"]
