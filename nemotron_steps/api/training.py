"""SFT, DPO, GRPO and an evaluation from a model, a data set and reward functions: steps, asked for in Python.

There is no trainer here. What is given becomes what the command line takes (a checkpoint, rows, `reward=`), so that
caching, lineage, resuming and every config key are those of the step.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, ClassVar

from nemotron_steps.api.functions import Reward, function_reference
from nemotron_steps.api.planned import (
    Input,
    Over,
    Overrides,
    Planned,
    Runnable,
    override_list,
    override_value,
    request_for,
    session_of,
    variables_of,
)
from nemotron_steps.api.result import Result
from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.errors import ConfigError, DataError, RequestError, StepsError, UnsupportedError
from nemotron_steps.rows.layouts import has_pair, prompt_layout, without_padding
from nemotron_steps.session.session import AUTO

_CORRECT = '{"prompt": "What is 1 + 1?", "answer": "2"}'


def data_reference(dataset: Any, folder: Path, *, argument: str = "dataset", of_prompts: bool = True) -> str:
    """What a plan takes as the input for a data set: a path, a reference or an artifact as it is, or the file in
    `folder` that rows in memory are written to. `of_prompts`: the first row must have one. DataError for what holds no
    rows, or a row that JSON cannot hold."""
    if isinstance(dataset, Artifact):
        return dataset.ref
    if isinstance(dataset, str | os.PathLike):
        return os.fspath(dataset)
    if isinstance(dataset, Mapping):
        found = f"{type(dataset).__name__} of {', '.join(map(str, dataset))[:120]}"
        what = "one data set is wanted, and this is a mapping of several, or a single row"
        raise DataError(what, where=argument, expected="rows, or a path", found=found)
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    count = 0
    with NamedTemporaryFile("wb", dir=folder, suffix=".partial", delete=False) as file:
        try:
            for count, row in enumerate(_rows(dataset, argument), start=1):
                line = _line(row, count, argument, of_prompts)
                digest.update(line)
                file.write(line)
            if not count:
                raise DataError("the data set has no rows", where=argument, expected=f"a row like {_CORRECT}")
            file.close()
            path = folder / f"{digest.hexdigest()[:16]}.jsonl"
            os.replace(file.name, path)
        finally:
            Path(file.name).unlink(missing_ok=True)
    return str(path)


def _rows(dataset: Any, argument: str) -> Iterator[Any]:
    """The rows of anything that has some."""
    if hasattr(dataset, "itertuples") and hasattr(dataset, "columns"):  # pandas
        names = [str(name) for name in dataset.columns]
        for values in dataset.itertuples(index=False, name=None):
            yield without_padding(dict(zip(names, values, strict=True)))
    elif hasattr(dataset, "__arrow_c_stream__"):  # polars, pyarrow, duckdb
        try:
            from pyarrow import RecordBatchReader
        except ImportError as error:
            what = f"a {type(dataset).__name__} is read by pyarrow, which is not installed"
            raise UnsupportedError(what, where=argument, hints=("pip install 'nemotron-steps[data]'",)) from error
        for batch in RecordBatchReader.from_stream(dataset):  # one in memory at a time
            yield from map(without_padding, batch.to_pylist())
    elif isinstance(dataset, Iterable):
        yield from map(without_padding, dataset) if hasattr(dataset, "features") else dataset  # of `datasets`
    else:
        expected = "a list of rows, a datasets.Dataset, a DataFrame, or the path of a file or folder"
        raise DataError("this holds no rows", where=argument, expected=expected, found=type(dataset).__name__)


def _line(row: Any, number: int, argument: str, of_prompts: bool) -> bytes:
    if not isinstance(row, Mapping):
        found = f"{type(row).__name__} {str(row)[:80]!r}"
        where, expected = f"{argument}, row {number}", f"a row like {_CORRECT}"
        raise DataError("a row is a mapping of columns", where=where, expected=expected, found=found)
    if number == 1 and of_prompts and not prompt_layout(row)[1] and not has_pair(row):
        found, expected = "columns " + ", ".join(map(str, row))[:200], f"a row like {_CORRECT}"
        hints = (f'{argument}=[{{**row, "prompt": row["COLUMN"]}} for row in {argument}]',)
        what = "nothing in the rows is a prompt"
        raise DataError(what, where=f"{argument}, row 1", expected=expected, found=found, hints=hints)
    cells = {str(name): _cell(value, f"{argument}, row {number}, column {name}") for name, value in row.items()}
    # A text may hold half of a surrogate pair, which JSON has as an escape.
    return json.dumps(cells, ensure_ascii=False, allow_nan=False).encode(errors="backslashreplace") + b"\n"


def _cell(value: Any, where: str) -> Any:
    """A value as JSON has it; a missing number or date of a table is null."""
    try:
        return json.loads(json.dumps(value, default=_plain), parse_constant=lambda _: None)
    except (TypeError, ValueError) as error:
        hints = ("leave the column out of the rows",)
        raise DataError("the value has no form in JSON", where=where, found=str(error), hints=hints) from error


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if type(value).__name__ in ("NAType", "NaTType"):  # pandas; its missing date has an isoformat
        return None
    for method in ("model_dump", "tolist", "isoformat"):  # pydantic, as OpenAI's messages; numpy; dates
        if callable(getattr(value, method, None)):
            return getattr(value, method)()
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__}")


class _Asked(Runnable):
    """A step that is asked for with a model and rows, ready to be planned or run."""

    STEP: ClassVar[str]
    MODEL: ClassVar[str]
    """The port of the model."""
    DATA: ClassVar[str] = "prompts"
    """The port of the rows; prompts are graded."""
    OTHER_NAMES: ClassVar[Mapping[str, str]] = {
        "target": "run(TARGET, inputs={PORT: REF})",
        "inputs": "model, dataset and validation",
        "train_dataset": "dataset",
        "eval_dataset": "validation",
        "reward_funcs": "rewards",
    }
    """Arguments as others call them → what is meant here."""

    def __init__(
        self,
        model: Input,
        dataset: Any,
        rewards: Reward | Sequence[Reward] | None = None,
        *,
        weights: Sequence[float] | None = None,
        validation: Any = None,
        config: str | os.PathLike[str] | None = None,
        overrides: Overrides = (),
        home: str | os.PathLike[str] | None = None,
        profile: str | None = None,
        over: Over = (),
        **sections: Any,
    ) -> None:
        for name, here in self.OTHER_NAMES.items():
            if name in sections:
                raise RequestError(f"{type(self).__name__} has no argument '{name}'", where=name, expected=here)
        given = sections.get("reward")
        if any(map(callable, given if isinstance(given, list | tuple) else [given])):  # no names, as the config's key
            if rewards is not None:
                raise RequestError("rewards are given twice", where="reward, rewards", hints=("rewards=[…]",))
            rewards = sections.pop("reward")
        if rewards is not None and self.DATA != "prompts":
            raise RequestError(f"{type(self).__name__} has no argument 'rewards'", expected="GRPO")
        self._session = session_of(home)
        # Functions and rows that have no file of their own are written into the home.
        self._folder = self._session.store.backend.local("given")
        functions = _named(rewards, weights, self._folder / "rewards")
        texts = [f"reward={override_value(functions)}"] if functions else []
        inputs = {self.MODEL: model, self.DATA: self._reference(dataset, "dataset")}
        if validation is not None and validation is not False:
            inputs["validation"] = self._reference(validation, "validation")
        elif validation is False and isinstance(self, GRPO):
            texts.append("heldout.share=0")
        asked = request_for(
            self.STEP,
            config=config if config is not None else AUTO,
            inputs=inputs,
            overrides=[*texts, *override_list(overrides)],
            profile=profile,
            over=over,
            **sections,
        )
        self._request = self._session.settled(asked)
        self._complete()

    def plan(self) -> Planned:
        """Type-check it; see `nemotron_steps.plan`. PlanError with every problem found."""
        return Planned(self._session, self._request)

    def _reference(self, dataset: Any, argument: str) -> str:
        of_prompts = self.DATA == "prompts"
        return data_reference(dataset, self._folder / "data", argument=argument, of_prompts=of_prompts)

    def _complete(self) -> None:
        """Add to the request what follows from it."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.command}>"


class SFT(_Asked):
    """A supervised fine-tuning (`sft/automodel`), ready to be planned or run.

    Args:
        model: a Hugging Face folder, a model's name on the hub, a reference or an artifact of the home, or the result
            of an earlier run.
        dataset: chats as OpenAI, ShareGPT, Alpaca, TRL or tables have them (docs/data.md), in the forms of GRPO's.
        validation: further chats; the loss on them is there before and after the training.
        config, overrides, home, profile, over, sections: as GRPO's.
    """

    STEP, MODEL, DATA = "sft/automodel", "model", "chats"


class DPO(_Asked):
    """A direct preference optimisation (`rl/nemo_rl/dpo`), ready to be planned or run.

    Args:
        model: as SFT's.
        dataset: pairs of a `chosen` and a `rejected` answer (docs/data.md), in the forms of GRPO's.
        validation: further pairs; the accuracy on them is there before and after the training.
        config, overrides, home, profile, over, sections: as GRPO's.
    """

    STEP, MODEL, DATA = "rl/nemo_rl/dpo", "policy", "preferences"


class GRPO(_Asked):
    """A GRPO training (`rl/nemo_rl/rlvr`), ready to be planned or run.

    Args:
        model: a Hugging Face folder, a model's name on the hub, a reference or an artifact of the home, or the result
            of an earlier run.
        dataset: prompts as TRL, verl, OpenAI chats or tables have them (docs/data.md): a path, or rows in memory (a
            list of mappings, a `datasets.Dataset`, a pandas or polars DataFrame, another table that exports Arrow).
        rewards: functions `f(prompts, completions, **columns) -> list of numbers`, asynchronous or not, or
            `FILE.py:NAME`. None: each row names the environment that grades it (`agent_ref`).
        weights: of the functions; None: 1 each. The reward is the weighted sum.
        validation: prompts to validate on, in any of the dataset's forms. Where no key says when, the policy is
            validated before and after the training; `grpo={"val_period": 10}` does it every ten steps. None: a tenth of
            50 or more prompts, 64 at most, is held out and graded before and after. False: nothing is.
        config: of the step; None for `auto`: `cpu`, `one_gpu` or, from eight GPUs on, `one_node`, by what this machine
            has, or the profile's `gpus_per_node`. `command` names the one that was chosen.
        overrides: texts in Hydra's grammar, or dotted keys and values.
        home: where artifacts and runs are; None for STEPS_HOME, or `.steps`.
        profile: of env.toml: where it runs.
        over: keys and values to fan out over: `{"grpo.seed": [42, 43]}` trains twice.
        sections: keys of the config: `grpo={"max_num_steps": 2}` is `grpo.max_num_steps=2`.

    Raises:
        ConfigError: a reward that is not a function, or cannot be taken to another process.
        DataError: a data set that holds no rows.
        RequestError: `target` or `inputs`, which follow from the other arguments.
    """

    STEP, MODEL = "rl/nemo_rl/rlvr", "policy"

    def _complete(self) -> None:
        if "validation" not in self._request.inputs:
            return
        try:
            with variables_of(self._session.profile_of(self._request)):
                composed = self._session.compose(self.STEP, self._request.config, self._request.overrides)
        except StepsError:
            return  # the plan says what is wrong, all of it
        flat = composed.flat
        if not (flat["grpo.val_period"] > 0 or flat["grpo.val_at_start"] or flat["grpo.val_at_end"]):
            overrides = (*self._request.overrides, "grpo.val_at_start=true", "grpo.val_at_end=true")
            self._request = replace(self._request, overrides=overrides)


class Evaluation(_Asked):
    """An evaluation (`eval/model_eval`), ready to be planned or run; see `evaluate`."""

    STEP, MODEL = "eval/model_eval", "model"


def evaluate(
    model: Input,
    dataset: Any,
    rewards: Reward | Sequence[Reward] | None = None,
    *,
    force: bool = False,
    resume: str | None = None,
    wait: bool = True,
    progress: bool = True,
    **request: Any,
) -> Result:
    """Grade a model's answers to prompts: the step `eval/model_eval`.

    Args:
        model, dataset, rewards, weights, overrides, home, profile, over: as GRPO's.
        config: of the step.
        force, resume, wait, progress: as those of `nemotron_steps.run`.
        request: the others, and keys of the config: `evaluation={"samples_per_prompt": 4}`.

    Returns:
        The run: `result.summary["reward"]` is the mean reward, `result.metrics["heldout/reward"][0]` as well.
    """
    asked = Evaluation(model, dataset, rewards, **request)
    return asked.run(force=force, resume=resume, wait=wait, progress=progress)


def _named(
    rewards: Reward | Sequence[Reward] | None, weights: Sequence[float] | None, folder: Path
) -> list[dict[str, Any]]:
    """`reward` as the config has it."""
    each = [] if rewards is None else list(rewards) if isinstance(rewards, list | tuple) else [rewards]
    shares = [1.0] * len(each) if weights is None else [float(weight) for weight in weights]
    if len(shares) != len(each):
        expected, hints = f"as many as there are rewards: {len(each)}", (f"weights={[1.0] * len(each)}",)
        raise ConfigError("every reward has a weight", where="weights", expected=expected, hints=hints)
    return [
        {"function": function_reference(reward, folder, position), "weight": share}  # type: ignore[arg-type]
        for position, (reward, share) in enumerate(zip(each, shares, strict=True))
    ]
