"""Faults as users make them: what was typed, the error, the hint, and what comes of pasting it.

They are the rows of docs/errors.md, which `test_faults` provokes; here is what there is before each. Where a new row is
wrong, the test says what the error and its hint are.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import nemotron_steps
from tests.hints import machines as on
from tests.hints.machines import Setup
from tests.hints.pasting import WORKS

PAGE = Path(nemotron_steps.__file__).parents[1] / "docs" / "errors.md"
CHAT = '{"messages": [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]}\n'
CHATS = on.files({"chats.jsonl": CHAT * 8})
REWARDS = on.files({"rewards.py": "def score(completions, **columns):\n    return [0.0] * len(completions)\n"})
MADE = on.after("run toy/make")
SECRET = "toy/train -c tiny judge.api_key=sk-abcdefghijklmnop"


def profile(text: str) -> Setup:
    return on.files({"env.toml": text})


def own_config(text: str) -> Setup:
    return on.files({"mine.yaml": text})


SETUPS: dict[str, Setup] = {
    "an artifact that is not there": MADE,
    "a run that is not there": MADE,
    "a config file that is not there": own_config("defaults: [tiny]\n"),
    "a misspelt key in a file": own_config("defaults: [tiny]\nstep: 2\n"),
    "a variable that is not set": own_config("defaults: [tiny]\nsteps: ${oc.env:STEPS_OF_MINE}\n"),
    "a misspelt input": on.questions(),
    "two inputs after one --input": on.together(on.model(), on.questions()),
    "an input of a pipeline's stage without --input": MADE,
    "a file that is not there": on.questions(),
    "nothing feeds an input": MADE,
    "an artifact of another type": MADE,
    "rows of another kind": on.questions(),
    "a placeholder left in": on.questions(),
    "a damaged artifact": on.damaged,
    "a few broken rows": on.questions(2, expected_answer=None),
    "a file cut off in its last line": on.cut_off,
    "rows of another shape, given to the preparation of prompts": on.files(
        {"rows.jsonl": '{"label": "2", "text": "1 + 1?"}\n'}
    ),
    "rows for an unknown environment": on.questions(100, agent_ref={"name": "my_own"}),
    "a layout that does not divide": on.together(on.model(), on.questions()),
    "lengths beyond the model's": on.model(),
    "a rotary scaling that is not computed": on.model(
        rope_scaling={"rope_type": "dynamic", "factor": 2.0}, rope_parameters=None
    ),
    "a mixture of experts under the embedded generator": on.model(family="qwen3_moe"),
    "a model without a chat template": on.model(template=False),
    "a quantised checkpoint": on.model(quantised=True),
    "no GPU": on.together(on.without_gpus, on.model(), on.questions()),
    "no GPU, and no config for CPU": on.together(on.without_gpus, on.model(), CHATS),
    "neither a GPU nor vLLM": on.together(on.without_gpus, on.without_package("vllm"), on.model(), on.questions()),
    "a package that is not installed": on.together(on.without_package("vllm"), on.model(), on.questions()),
    "a reward function that is not there": REWARDS,
    "a reward file without a function": REWARDS,
    "rows without a column that is known as a prompt": on.together(
        on.model(), on.files({"rows.jsonl": '{"label": 2, "text": "1 + 1?"}\n'}), REWARDS
    ),
    "a table without a column that is known as a prompt": on.together(
        on.model(), on.files({"rows.csv": "label,text\n2,1 + 1?\n"}), REWARDS
    ),
    "rows that nothing grades": on.together(on.model(), on.plain_rows, REWARDS),
    "a judge that does not answer": on.together(on.questions(), on.judge_elsewhere),
    "a full disk": on.full_disk,
    "a port in use": on.port_taken,
    "a misspelt profile": profile('[cluster]\nexecutor = "local"\n'),
    "a misspelt key of a profile": profile('[cluster]\nexecutor = "slurm"\npartitoin = "gpu"\n'),
    "W&B without a key": on.mirrored_by_wandb,
    "a misspelt key of a manifest": on.files(
        {"manifests/mine.toml": '[step]\nid = "mine/step"\nname = "Mine"\ncategroy = "x"\n'}
    ),
    "resuming a run that is at work": on.at_work,
    "cancelling a finished run": MADE,
    "resuming a run that had a secret": on.after(f"run {SECRET}"),
}
PASTED = {"a pipeline begun in the middle": 1, "a package that is not installed": 1}
"""Where the hint that was pasted is not the first one: its number."""


@dataclass(frozen=True)
class Fault:
    """A row of the page."""

    name: str
    command: str
    """What was typed, after `steps`."""
    code: str
    """Of the error; `warning` where the run goes on."""
    hint: str
    then: str
    """`works`, or the code of the next error, which is another one."""
    put: Mapping[str, str]
    """What stands for the hint's words in capitals."""
    again: bool
    """The hint is a command of its own, after which the one that was typed is typed again."""


def _row(line: str) -> Fault:
    name, *cells = (cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1])
    typed, code, hint, pasted = (re.sub(r"^(`+) ?(.*?) ?\1$", r"\2", cell) for cell in cells)
    then, _, put = pasted.partition(" (with ")
    words = re.findall(r"`([^`]+)` for `([^`]+)`", put)
    code = "warning" if code == "a warning" else code
    next_code = then.removeprefix("the next thing to say: ")
    then = next_code if next_code != then else WORKS
    again = pasted.startswith("the same command again works")
    return Fault(name, typed.removeprefix("steps "), code, hint, then, {word: value for value, word in words}, again)


ROWS = PAGE.read_text(encoding="utf-8").partition("|---|---|---|---|---|\n")[2]
FAULTS = [_row(line) for line in ROWS.splitlines()]
