"""GRPO from a model, a data set and reward functions: the step `rl/nemo_rl/rlvr`, asked for in Python.

There is no trainer here. The three become what the command line takes (a checkpoint, prompts, `reward=`), so that
caching, lineage, resuming and every config key are those of the step.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemotron_steps.api.asking import Input, Overrides, asked_for, override_list, override_value
from nemotron_steps.api.functions import Reward, function_reference
from nemotron_steps.api.given_rows import data_reference
from nemotron_steps.api.planned import Planned, bench_of
from nemotron_steps.api.result import Result
from nemotron_steps.errors import ConfigError

STEP = "rl/nemo_rl/rlvr"
_GIVEN = "given"
"""Folder of the home for functions and rows that have no file of their own."""


class GRPO:
    """A GRPO training, ready to be planned or run.

    Args:
        model: a Hugging Face folder, a model's name on the hub, a reference or an artifact of the home.
        dataset: prompts as TRL, verl, OpenAI chats or tables have them (docs/data.md): a path, or rows in memory (a
            list of mappings, a `datasets.Dataset`, a pandas or polars DataFrame).
        rewards: functions `f(prompts, completions, **columns) -> list of numbers`, asynchronous or not, or
            `FILE.py:NAME`. None: each row names the environment that grades it (`agent_ref`).
        weights: of the functions; None: 1 each. The reward is the weighted sum.
        config: of the step; None: `one_gpu`, or `cpu` on a machine without GPUs.
        overrides: texts in Hydra's grammar, or dotted keys and values.
        home: where artifacts and runs are; None for STEPS_HOME, or `.steps`.
        sections: keys of the config: `grpo={"max_num_steps": 2}` is `grpo.max_num_steps=2`.

    Raises:
        ConfigError: a reward that is no function, or cannot be taken to another process.
        DataError: a data set that holds no rows.
    """

    def __init__(
        self,
        model: Input,
        dataset: Any,
        rewards: Reward | Sequence[Reward] | None = None,
        *,
        weights: Sequence[float] | None = None,
        config: str | os.PathLike[str] | None = None,
        overrides: Overrides = (),
        home: str | os.PathLike[str] | None = None,
        **sections: Any,
    ) -> None:
        self._bench = bench_of(home)
        given = self._bench.store.backend.local(_GIVEN)
        functions = _named(rewards, weights, given / "rewards")
        self._asked = asked_for(
            STEP,
            config=config if config is not None else _config_here(),
            inputs={"policy": model, "prompts": data_reference(dataset, given / "data")},
            overrides=[
                *([f"reward={override_value(functions)}"] if functions else []),
                *override_list(overrides),
            ],
            sections=sections,
        )
        self.command = self._asked.redacted().command
        """The same on the command line, after `steps run`."""

    def plan(self) -> Planned:
        """Type-check it; see `nemotron_steps.plan`. PlanError with every problem found."""
        return Planned(self._bench, self._asked)

    def run(self, *, force: bool = False, resume: str | None = None, progress: bool = True) -> Result:
        """Train; see `nemotron_steps.run`. What is there already is not made again."""
        from nemotron_steps.api.running import run_asked

        return run_asked(self._bench, self._asked, force=force, resume=resume, progress=progress)

    def __repr__(self) -> str:
        return f"<GRPO {self.command}>"


def _named(
    rewards: Reward | Sequence[Reward] | None, weights: Sequence[float] | None, folder: Path
) -> list[dict[str, Any]]:
    """`reward` as the config has it."""
    each = [] if rewards is None else list(rewards) if isinstance(rewards, list | tuple) else [rewards]
    shares = [1.0] * len(each) if weights is None else [float(weight) for weight in weights]
    if len(shares) != len(each):
        raise ConfigError(
            "every reward has a weight",
            where="weights",
            expected=f"{len(each)} weights",
            found=str(len(shares)),
            hints=(f"weights={[1.0] * len(each)}",),
        )
    return [
        {"function": function_reference(reward, folder, position), "weight": share}  # type: ignore[arg-type]
        for position, (reward, share) in enumerate(zip(each, shares, strict=True))
    ]


def _config_here() -> str:
    """`one_gpu` where there is a GPU that may be used, else `cpu`."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return "one_gpu" if not hidden and any(Path("/dev").glob("nvidia[0-9]*")) else "cpu"
