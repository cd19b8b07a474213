"""Grading a policy: on prompts it does not train on, and how often it solves each prompt.

What is sampled for one prompt follows from the seed and its place in the file: a cut-off rating goes on where it was.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from nemotron_steps.engine.rollouts.collector import RolloutCollector
from nemotron_steps.engine.rollouts.data import PromptRow
from nemotron_steps.engine.types import Rollout, RolloutGroup
from nemotron_steps.environments.judged.genrm_compare import parse_reply
from nemotron_steps.environments.judged.judges import Judge
from nemotron_steps.environments.responses import split_reasoning


@dataclass(frozen=True)
class EvaluationResult:
    """Figures of one evaluation. Samples that nobody graded are counted, never scored."""

    reward: float
    standard_error: float
    """Of the mean reward, over prompts."""
    samples: int
    """Answers that the reward is of."""
    ungraded: int
    """Further answers, which nobody graded."""
    truncation_rate: float
    answer_tokens: float
    """Mean per answer; this and the truncation rate are of all answers."""
    reward_by_environment: dict[str, float]
    components: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """As JSON-serialisable fields."""
        return asdict(self)

    def metrics(self, name: str) -> dict[str, float]:
        """As metrics `NAME/reward`, ..., `NAME/reward/ENVIRONMENT` and `NAME/components/COMPONENT`."""
        own = {f"{name}/{key}": value for key, value in asdict(self).items() if not isinstance(value, dict)}
        environments = {f"{name}/reward/{key}": value for key, value in self.reward_by_environment.items()}
        return own | environments | {f"{name}/components/{key}": value for key, value in self.components.items()}


def before_and_after(name: str, before: EvaluationResult, after: EvaluationResult) -> dict[str, Any]:
    """What a training changed, for its summary."""

    def change(figure: str) -> dict[str, float]:
        return {"before": getattr(before, figure), "after": getattr(after, figure)}

    return {
        f"{name}_reward": change("reward") | {figure: change(figure) for figure in ("standard_error", "samples")},
        f"{name}_answer_tokens": change("answer_tokens"),
        f"{name}_truncation_rate": change("truncation_rate"),
    }


def summarize(groups: Sequence[RolloutGroup]) -> EvaluationResult:
    """Aggregate graded groups. The reward is the mean over prompts of the mean over their samples."""
    by_prompt: list[float] = []
    by_environment: dict[str, list[float]] = defaultdict(list)
    components: dict[str, list[float]] = defaultdict(list)
    rollouts: list[Rollout] = []
    for group in groups:
        graded = [r for r in group.rollouts if r.failure is None]
        rollouts.extend(group.rollouts)
        if graded:
            by_prompt.append(sum(r.reward for r in graded) / len(graded))
        for rollout in graded:
            by_environment[rollout.environment].append(rollout.reward)
            for name, value in rollout.components.items():
                components[name].append(value)
    spread = stdev(by_prompt) if len(by_prompt) > 1 else math.nan
    count = max(1, len(rollouts))
    ungraded = sum(r.failure is not None for r in rollouts)
    return EvaluationResult(
        reward=fmean(by_prompt) if by_prompt else math.nan,
        standard_error=spread / math.sqrt(len(by_prompt) or 1),
        samples=len(rollouts) - ungraded,
        ungraded=ungraded,
        truncation_rate=sum(r.truncated for r in rollouts) / count,
        answer_tokens=sum(float(r.metadata.get("answer_tokens") or 0) for r in rollouts) / count,
        reward_by_environment={name: sum(v) / len(v) for name, v in sorted(by_environment.items())},
        components={name: sum(v) / len(v) for name, v in sorted(components.items())},
    )


@dataclass(frozen=True)
class Agreement:
    """Counts over held-out pairs."""

    pairs: int
    agreed: int
    unparsed: int

    @property
    def rate(self) -> float:
        """Share of pairs on which judge and label prefer the same answer."""
        return self.agreed / self.pairs if self.pairs else float("nan")


def preference(verdict: tuple[float, float, float]) -> int:
    """1 or 2: the preferred answer; 0: a tie. Scores decide, the ranking breaks their ties."""
    score_1, score_2, ranking = verdict
    if score_1 != score_2:
        return 1 if score_1 > score_2 else 2
    return 0 if ranking == 3.5 else (1 if ranking < 3.5 else 2)


def measure_agreement(
    judge: Judge, rows: Sequence[PromptRow], *, temperature: float, max_tokens: int
) -> tuple[Agreement, list[dict[str, Any]]]:
    """Ask the judge every row: counts, and one record a pair (question, label, reply)."""

    async def ask_all() -> list[str]:
        asked = (
            judge.complete(row.row["messages"][:-1], temperature=temperature, top_p=1.0, max_tokens=max_tokens)
            for row in rows
        )
        return await asyncio.gather(*asked)

    replies = asyncio.run(ask_all())
    agreed = unparsed = 0
    records: list[dict[str, Any]] = []
    for row, reply in zip(rows, replies, strict=True):
        label_text = row.row["messages"][-1]["content"]
        label = parse_reply(split_reasoning(label_text)[1], 3.0, 3.5)
        found = parse_reply(split_reasoning(reply)[1], 3.0, 3.5)
        unparsed += found is None
        same = label is not None and found is not None and preference(found) == preference(label)
        agreed += same
        prompt = row.row["messages"][-2]["content"]
        records.append({"prompt": prompt, "response": reply, "label": label_text, "reward": float(same)})
    return Agreement(len(rows), agreed, unparsed), records


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
        whole = 0
        if path.is_file():
            with path.open("rb") as lines:
                for line in lines:
                    if not line.endswith(b"\n"):
                        break
                    rate = PassRate(**json.loads(line))
                    self.rates[rate.index] = rate
                    whole += len(line)
        self._file = path.open("ab")
        self._file.truncate(whole)

    def add(self, rate: PassRate) -> None:
        """Keep a rate."""
        self._file.write(json.dumps(asdict(rate), separators=(",", ":")).encode() + b"\n")
        self._file.flush()
        self.rates[rate.index] = rate

    def figures(self) -> dict[str, float]:
        """Over the prompts that have a rate: its mean, and the shares that were solved always and never."""
        known = [rate for rate in self.rates.values() if rate.rate is not None]
        if not known:
            return {}
        return {
            "pass_rate": sum(rate.passed / rate.graded for rate in known) / len(known),
            "always_solved_share": sum(rate.passed == rate.graded for rate in known) / len(known),
            "never_solved_share": sum(rate.passed == 0 for rate in known) / len(known),
        }

    def close(self) -> None:
        """Close the file."""
        self._file.close()


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
    gate = asyncio.Semaphore(at_once)

    async def rate(number: int, prompt: PromptRow) -> None:
        group = await collector.collect_group(prompt, group_id=f"difficulty/{prompt.index}", num_generations=samples)
        rated(number, prompt, group)
        gate.release()

    try:
        async with asyncio.TaskGroup() as under_way:
            for prompt in prompts:
                await gate.acquire()
                under_way.create_task(rate(began(prompt), prompt))
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None


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
