"""How often a policy solves each prompt. What is sampled for one follows from the seed and its place in the file, so
that a cut-off rating goes on where it was."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nemotron_steps.engine.rollouts.collector import RolloutCollector
from nemotron_steps.engine.rollouts.data import PromptRow
from nemotron_steps.engine.types import RolloutGroup


@dataclass(frozen=True)
class PassRate:
    """What a policy made of one prompt."""

    index: int
    graded: int
    passed: int
    mean_reward: float | None
    answer_tokens: float

    @property
    def rate(self) -> float | None:
        """Share of the graded samples that passed; None where nothing was graded."""
        return self.passed / self.graded if self.graded else None

    @classmethod
    def of(cls, index: int, group: RolloutGroup, pass_reward: float) -> PassRate:
        """Of a graded group."""
        rewards = [rollout.reward for rollout in group.rollouts if rollout.failure is None]
        tokens = [float(rollout.metadata.get("answer_tokens") or 0) for rollout in group.rollouts]
        return cls(
            index,
            len(rewards),
            sum(reward >= pass_reward for reward in rewards),
            sum(rewards) / len(rewards) if rewards else None,
            sum(tokens) / len(tokens) if tokens else 0.0,
        )


class RateJournal:
    """Rates on disk, one a line, each there as soon as it is known. A last line that a kill cut off is dropped."""

    def __init__(self, path: Path) -> None:
        self.rates: dict[int, PassRate] = {}
        self._known = self._always = self._never = 0
        self._sum = 0.0
        whole = 0
        if path.is_file():
            with path.open("rb") as lines:
                for line in lines:
                    if not line.endswith(b"\n"):
                        break
                    self._count(PassRate(**json.loads(line)))
                    whole += len(line)
        self._file = path.open("ab")
        self._file.truncate(whole)

    def add(self, rate: PassRate) -> None:
        """Keep a rate."""
        self._file.write(json.dumps(asdict(rate), separators=(",", ":")).encode() + b"\n")
        self._file.flush()
        self._count(rate)

    def figures(self) -> dict[str, float]:
        """Over the prompts that have a rate: its mean, and the shares that were solved always and never."""
        if not self._known:
            return {}
        return {
            "pass_rate": self._sum / self._known,
            "always_solved_share": self._always / self._known,
            "never_solved_share": self._never / self._known,
        }

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _count(self, rate: PassRate) -> None:
        self.rates[rate.index] = rate
        if rate.rate is not None:
            self._known += 1
            self._sum += rate.rate
            self._always += rate.passed == rate.graded
            self._never += rate.passed == 0


async def rate_prompts(
    collector: RolloutCollector,
    prompts: Iterable[PromptRow],
    *,
    samples: int,
    at_once: int,
    began: Callable[[PromptRow], int],
    rated: Callable[[int, PromptRow, RolloutGroup], None],
) -> None:
    """Sample and grade every prompt."""
    under_way: dict[asyncio.Task[RolloutGroup], tuple[int, PromptRow]] = {}

    async def wait_for_some() -> None:
        done, _ = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
        for task in sorted(done, key=lambda each: under_way[each][1].index):
            number, prompt = under_way.pop(task)
            rated(number, prompt, task.result())

    try:
        for prompt in prompts:
            collecting = collector.collect_group(prompt, group_id=f"difficulty/{prompt.index}", num_generations=samples)
            under_way[asyncio.ensure_future(collecting)] = (began(prompt), prompt)
            if len(under_way) >= at_once:
                await wait_for_some()
        while under_way:
            await wait_for_some()
    finally:
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)


def by_difficulty(rates: Mapping[int, PassRate], kept: Iterable[int], *, easy_first: bool) -> list[int]:
    """Places of the kept prompts, sorted: by pass rate, then mean reward, then as they stood."""
    places = list(kept)
    with_rate = [place for place in places if rates[place].rate is not None]
    without = [place for place in places if rates[place].rate is None]
    sign = -1.0 if easy_first else 1.0

    def difficulty(place: int) -> tuple[float, float, int]:
        found: Any = rates[place]
        return sign * found.rate, sign * found.mean_reward, place

    spread: list[tuple[float, bool, int]] = []
    for group in (sorted(with_rate, key=difficulty), without):
        spread += [((at + 0.5) / len(group), group is without, place) for at, place in enumerate(group)]
    return [place for _, _, place in sorted(spread, key=lambda each: each[:2])]
