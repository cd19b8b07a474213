"""data_prep/rl_prep: prompts with verifier fields in the NeMo-Gym row shape, split so that no question is in two."""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

from nemotron_steps.artifacts.files import storage_errors, to_json_bytes, write_atomic
from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.config.names import nearest
from nemotron_steps.config.schema.data_prep import LowEffortShare, ReasoningGymSource, RlPrepConfig
from nemotron_steps.engine.rollouts.low_effort import asks_for_low_effort, low_effort_row
from nemotron_steps.environments.agents import stands_for
from nemotron_steps.environments.registry import names
from nemotron_steps.errors import ConfigError
from nemotron_steps.rows.layouts import REQUEST
from nemotron_steps.rows.lines import Row, parse_row, read_rows
from nemotron_steps.runs.context import StepContext
from nemotron_steps.steps.data_prep.blends.placeholders import Placeholders
from nemotron_steps.steps.data_prep.blends.prepare import ACCOUNTING, prepare, sources_of
from nemotron_steps.steps.data_prep.blends.prepare import check as check_sources
from nemotron_steps.steps.data_prep.gym_tasks import draw_questions
from nemotron_steps.steps.data_prep.prompt_work import LengthCheck, PromptWork, agent_ref
from nemotron_steps.steps.data_prep.split_files import PROMPT_FILES, Split, write_splits

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
        sources = config.placeholders.model_dump()
        placeholders = Placeholders(sources, config.mirror, str(context.work / "placeholders"))
        counts = prepare(
            sources_of(config),
            PromptWork(config.agent, config.check_environments, placeholders, config.prompt_length),
            config,
            folder=folder,
            files=files,
            staging=context.work / "shards",
            tracker=context.tracker,
        )
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
    """Refuse a source that is not there, and a name in `low_effort.environments` that no environment has: its prompts
    would never be converted."""
    named, known = config.low_effort.environments if config.low_effort is not None else (), names()
    for name in named:
        if name not in known:
            rest = [other for other in named if other != name]
            close = nearest(name, known)
            raise ConfigError(
                f"low_effort converts the prompts of '{name}', and there is no environment of that name",
                where="low_effort.environments",
                expected=" or ".join(close) or f"one of {', '.join(known)}",
                found=name,
                hints=[f"low_effort.environments=[{','.join(kept)}]" for kept in ([*rest, *close[:1]], rest) if kept],
            )
    check_sources(config, inputs)


def gym_rows(config: RlPrepConfig, source: ReasoningGymSource) -> dict[Split, list[Row]]:
    """Rows of reasoning-gym questions. Their verifier fields are there whichever agent is named: any environment may
    grade them later."""
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
    """Put `low_effort.string` into a share of a file's `total` prompts: of the environments named, those whose hash is
    least. A line that is not converted stays byte for byte. Returns how many were `wanted`, `found` with the string in
    them, `converted`, and would have become `too_long`."""
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
