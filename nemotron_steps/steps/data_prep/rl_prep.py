"""data_prep/rl_prep: prompts with verifier fields in the NeMo-Gym row shape, split so that no question is in two."""

from __future__ import annotations

import heapq
import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from nemotron_steps.artifacts.files import storage_errors, to_json_bytes, write_atomic
from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.config.names import nearest
from nemotron_steps.config.schema.data_prep import LowEffortShare, PromptLengthConfig, ReasoningGymSource, RlPrepConfig
from nemotron_steps.engine.rollouts.data import asks_for_low_effort, low_effort_row
from nemotron_steps.environments.registry import (
    agent_of,
    environment_class,
    names,
    resolve,
    settings_of,
    stands_for,
    unknown_agent,
)
from nemotron_steps.errors import ConfigError, DataError, UnsupportedError
from nemotron_steps.rows.layouts import REQUEST, prompt_layout, read_request, text_columns
from nemotron_steps.rows.lines import Row, parse_row, read_rows
from nemotron_steps.runs.context import StepContext
from nemotron_steps.steps.data_prep.blends.placeholders import PLACEHOLDER, PlaceholderFiller
from nemotron_steps.steps.data_prep.blends.prepare import ACCOUNTING, prepare, sources_of
from nemotron_steps.steps.data_prep.blends.prepare import check as check_sources
from nemotron_steps.steps.data_prep.blends.shards import RowFunction, RowLeftOut
from nemotron_steps.steps.data_prep.blends.splits import PROMPT_FILES, Split, write_splits
from nemotron_steps.steps.data_prep.gym_tasks import draw_questions

if TYPE_CHECKING:
    from nemotron_steps.environments.base import Environment


TREE: dict[Split, str] = {"train": "train/data.jsonl", "validation": "val/data.jsonl", "heldout": "test/data.jsonl"}
GYM_AGENT = "reasoning_gym_simple_agent"


def run(context: StepContext[RlPrepConfig]) -> None:
    """Write the `prompts` output."""
    config = context.config
    folder = context.outputs["prompts"].path
    files = TREE if config.layout == "tree" else PROMPT_FILES
    if config.reasoning_gym is not None:
        counts = write_splits(folder, files, gym_rows(config, config.reasoning_gym))
    else:
        filler = PlaceholderFiller(config.placeholders.model_dump(), config.mirror)
        work = partial(prompt_rows, config.agent, config.check_environments, filler, config.prompt_length)
        counts = prepare(context, sources_of(config), work, folder, files)
    if config.low_effort is not None:
        fits = LengthCheck(config.prompt_length).fits if config.prompt_length is not None else None
        share = convert_low_effort(folder / files["train"], counts["train"], config.low_effort, fits)
        context.tracker.summary({f"low_effort_{name}": count for name, count in share.items()})
        if (folder / ACCOUNTING).exists():
            record = json.loads((folder / ACCOUNTING).read_bytes())
            write_atomic(folder / ACCOUNTING, to_json_bytes({**record, "low_effort": share}))
    if config.layout == "tree":
        # The keys of the published manifest; paths are relative, so that a copy of the folder is as good.
        manifest = {Path(name).parent.name: name if split in counts else "" for split, name in files.items()}
        (folder / "manifest.json").write_bytes(to_json_bytes({**manifest, "mode": "resolve"}))
    context.tracker.summary({f"{split}_prompts": count for split, count in counts.items()})


def check(config: RlPrepConfig, inputs: Mapping[str, Artifact | None]) -> None:
    """Refuse a source that is not there, and an unknown name in `low_effort.environments`."""
    named, known = config.low_effort.environments if config.low_effort is not None else (), names()
    for name in named:
        if name not in known:
            rest = [other for other in named if other != name]
            close = nearest(name, known)
            raise ConfigError(
                f"low_effort converts the prompts of '{name}', an unknown environment",
                where="low_effort.environments",
                expected=" or ".join(close) or f"one of {', '.join(known)}",
                found=name,
                hints=[f"low_effort.environments=[{','.join(kept)}]" for kept in ([*rest, *close[:1]], rest) if kept],
            )
    check_sources(config, inputs)


def gym_rows(config: RlPrepConfig, source: ReasoningGymSource) -> dict[Split, list[Row]]:
    """Rows of reasoning-gym questions, with verifier fields whichever agent is named."""
    return {
        split: [
            {
                "responses_create_params": {"input": [{"role": "user", "content": q.text}]},
                **q.fields,
                "agent_ref": agent_ref(config.agent or q.asked.agent or GYM_AGENT),
            }
            for q in questions
        ]
        for split, questions in draw_questions(source, config.rows).items()
    }


def convert_low_effort(
    path: Path, total: int, config: LowEffortShare, fits: Callable[[Row, str], bool] | None = None
) -> dict[str, int]:
    """Put `low_effort.string` into a share of the prompts, those whose hash is least; other lines stay as they are."""
    count = {"wanted": round(config.share * total), "found": 0, "converted": 0, "too_long": 0}

    def draws() -> Iterator[int]:
        for number, row in read_rows(path):
            has_it = asks_for_low_effort(row, f"{path}:{number}", config.string)
            count["found"] += has_it
            if not has_it and _environment(row) in config.environments:
                yield _draw(row, config.seed)

    least = heapq.nsmallest(count["wanted"], draws())
    chosen: Counter[int | None] = Counter(
        least[: max(0, count["wanted"] - count["found"])]
    )  # rows that ask the same share a hash
    with storage_errors(path), path.open("rb") as lines, path.with_suffix(".converted").open("wb") as out:
        for number, line in enumerate(lines, start=1):
            row = parse_row(line, f"{path}:{number}")[0]
            draw = _draw(row, config.seed) if chosen and _environment(row) in config.environments else None
            if chosen[draw] > 0:
                chosen[draw] -= 1
                converted = low_effort_row(row, config.string)
                fit = fits is None or fits(converted, f"{path}:{number}")
                count["converted" if fit else "too_long"] += 1
                line = json.dumps(converted, ensure_ascii=False).encode() + b"\n" if fit else line
            out.write(line)
    path.with_suffix(".converted").replace(path)
    return count


def _environment(row: Row) -> str | None:
    reference = row.get("agent_ref")
    name = reference.get("name") if isinstance(reference, Mapping) else None
    return _environment_of(name) if isinstance(name, str) else None


_environment_of = lru_cache(maxsize=None)(stands_for)


def _draw(row: Row, seed: int) -> int:
    asked = json.dumps([seed, row[REQUEST]], sort_keys=True, ensure_ascii=False)
    return int.from_bytes(blake2b(asked.encode("utf-8", "surrogatepass"), digest_size=8).digest())


def agent_ref(name: str) -> dict[str, str]:
    """The reference to a NeMo-Gym agent."""
    return {"type": "responses_api_agents", "name": name}


def prompt_rows(
    agent: str | None, check_environments: bool, filler: PlaceholderFiller, limit: PromptLengthConfig | None
) -> RowFunction:
    """Of the user's own prompts: filled in, checked, named an agent, left out where they are too long."""
    check_environment = EnvironmentChecks() if check_environments else None
    length = LengthCheck(limit) if limit is not None else None

    def become(where: str, row: Row) -> list[Row] | None:
        changed = PLACEHOLDER in row
        if changed:
            row = filler.fill(row, where)
        try:
            read_request(row, where)
        except DataError as error:
            if "responses_create_params" not in row:  # else it is meant to be a prompt
                path = shlex.quote(where.rpartition(":")[0])
                named = [f" prompt_column={name}" for name in text_columns(row)[:1]]
                ends = [""] if prompt_layout(row)[1] else named
                imported = f"steps run data_prep/import_prompts --input dataset={path}"
                error.hints = (*(imported + end for end in ends), *error.hints)
            raise
        if agent is not None and row.get("agent_ref") is None:
            row["agent_ref"] = agent_ref(agent)
            changed = True
        if check_environment is not None:
            check_environment(where, row)
        if length is not None and not length.fits(row, where):
            raise RowLeftOut(f"the prompt has more than {length.max_tokens} tokens")
        return [row] if changed else None

    return become


class LengthCheck:
    """Tells prompts that have more tokens than a policy may read."""

    def __init__(self, config: PromptLengthConfig) -> None:
        from nemotron_steps.models.chat import ChatFormat

        self._chat = ChatFormat.from_folder(config.tokenizer)
        self.max_tokens = config.max_tokens

    def fits(self, row: Row, where: str) -> bool:
        """Whether a policy may read the prompt."""
        asked = read_request(row, where)
        return len(self._chat.render(asked.messages, asked.tools)) <= self.max_tokens


class EnvironmentChecks:
    """Asks each row's environment whether it could score the row; those that need a run's settings are not asked."""

    def __init__(self) -> None:
        self._environments: dict[str, Environment | None] = {}

    def __call__(self, where: str, row: Row) -> None:
        """Refuse an unusable row."""
        reference = row.get("agent_ref")
        if not isinstance(reference, dict) or reference.get("name") is None:
            raise DataError(
                "the row names no agent, so nothing says which environment grades it",
                where=f"{where} field agent_ref.name",
                expected='"agent_ref": {"type": "responses_api_agents", "name": ...}',
                found="no agent_ref",
                hints=("agent=reasoning_gym_simple_agent", "check_environments=false"),
            )
        agent = agent_of(row, where)
        if agent not in self._environments:
            environment = None
            with suppress(ConfigError, UnsupportedError):
                found = resolve(agent, {})
                if found is None:
                    # Only a training step has settings that say what a new agent stands for.
                    raise unknown_agent(agent, where, hints=("check_environments=false",))
                name, settings = found
                environment = environment_class(name)(settings_of(name, settings), {})
            self._environments[agent] = environment
        environment = self._environments[agent]
        if environment is not None:
            environment.check_row(row, where)
