"""Small GRPO runs of real parts (Megatron policy, embedded generator, environments), for the tests of the loops."""

import shutil
import time
from dataclasses import replace
from pathlib import Path

from nemotron_steps.config.schema.rl import RlConfig
from nemotron_steps.engine.grpo.async_loop import train_async
from nemotron_steps.engine.grpo.loop import train
from nemotron_steps.engine.placement.run import build_run
from nemotron_steps.engine.rollouts.data import read_rows
from nemotron_steps.engine.setup.rows import RunRows
from nemotron_steps.runs.context import Tracker
from tests.models.hybrid_twins import write_hybrid


def write_hybrid_for(task: Path, twin: str, folder: Path) -> Path:
    """A small Nemotron-H with the tokenizer and prompts of the task; returns its folder."""
    write_hybrid(twin, folder, vocab_size=259, initializer_range=0.1)
    for file in task.iterdir():
        if "tokenizer" in file.name or file.suffix in (".jinja", ".jsonl"):
            shutil.copy(file, folder)
    return folder


def config_of(checkpoint, steps, *, environment: str | None = None, schema=RlConfig, **changes) -> RlConfig:
    """Four groups of eight a step; `changes` by dotted key, with `__` for the dot."""
    values: dict = {
        "grpo": {
            "num_prompts_per_step": 4,
            "num_generations_per_prompt": 8,
            "max_num_steps": steps,
            "max_num_epochs": 9,
        },
        "loss_fn": {
            "force_on_policy_ratio": True,
            "use_importance_sampling_correction": bool(changes.get("grpo__async_grpo__enabled")),
        },
        "policy": {
            "checkpoint": str(checkpoint),
            "precision": "float32",
            "train_micro_batch_size": 32,
            "logprob_batch_size": 32,
            "max_total_sequence_length": 96,
            "megatron_cfg": {"optimizer": {"lr": 2e-3}},
            "generation": {"max_new_tokens": 16, "max_sequences": 32},
        },
        "data": {"train": {"data_path": str(checkpoint / "train.jsonl")}},
        "checkpointing": {"save_period": 3, "keep_top_k": None},
    }
    if environment is not None:
        values["env"] = {"should_use_nemo_gym": False, "environment": environment}
    for dotted, value in changes.items():
        node = values
        *parents, last = dotted.split("__")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return schema.model_validate(values)


def start(config, work, records=None, rows=None, *, begun_s_ago=0.0):
    """The run's live parts; records of its tracker go into `records`."""
    listener = None if records is None else records.append
    run, _ = build_run(
        config,
        RunRows(rows or read_rows(config.data.train.data_path)),
        work=work,
        started=time.monotonic() - begun_s_ago,
        reporter=Tracker("test", None, listener),
    )
    return run


def marked(rows, **marks):
    """Prompts with further fields: a list of values each."""
    return [
        replace(row, row={**row.row, **{name: values[i] for name, values in marks.items()}})
        for i, row in enumerate(rows)
    ]


def run_loop(run):
    """The loop that the run's config asks for."""
    return (train_async if run.config.grpo.async_grpo.enabled else train)(run)


def metrics_of(records):
    return [r["values"] for r in records if r["kind"] == "metrics"]


def stop_after(run, step):
    """Make the run end as by Ctrl-C when it logs this step."""
    listener = run.reporter._listener

    def listen(record):
        listener(record)
        if record["kind"] == "metrics" and record["index"] == step:
            raise KeyboardInterrupt

    run.reporter._listener = listen


def events_of(records, name):
    return [r["fields"] for r in records if r["kind"] == "event" and r["name"] == name]
