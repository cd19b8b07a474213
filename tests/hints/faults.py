"""Faults as users make them: what was typed, the error, the hint, and what comes of pasting it.

docs/errors.md is this table, and `test_faults` provokes each of them. A new row needs its command alone: the test says
what the error and its hint are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.hints import machines as on
from tests.hints.machines import Setup
from tests.hints.pasting import WORKS


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        name: what went wrong, in a user's words.
        command: what was typed, after `steps`.
        code: of the error; `warning` where the run goes on.
        hint: what was pasted: the first hint, or that of number `pasted`.
        then: `works`, or the code of the next error, which is another one.
        setup: what there is before.
        put: what stands for the hint's words in capitals.
        again: the hint is a command of its own, after which the one that was typed is typed again.
    """

    name: str
    command: str
    code: str
    hint: str
    then: str = WORKS
    setup: Setup = lambda bench: None
    put: Mapping[str, str] = field(default_factory=dict)
    pasted: int = 0
    again: bool = False


RLVR = "rl/nemo_rl/rlvr -c tiny"
PREP = "run data_prep/rl_prep rows.validation=0 jsonl.path=rows.jsonl"
SMALL = (
    "grpo.max_num_steps=1 grpo.num_prompts_per_step=2 grpo.num_generations_per_prompt=2 grpo.val_period=-1 "
    "policy.generation.max_new_tokens=4 policy.train_global_batch_size=4"
)
OWN = "--input policy=model --input prompts=rows.jsonl"
CHAT = '{"messages": [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]}\n'
CHATS = on.files({"chats.jsonl": CHAT * 8})
REWARDS = on.files({"rewards.py": "def score(completions, **columns):\n    return [0.0] * len(completions)\n"})
SECRET = "toy/train -c tiny judge.api_key=sk-abcdefghijklmnop"


def profile(text: str) -> Setup:
    return on.files({"env.toml": text})


def own_config(text: str) -> Setup:
    return on.files({"mine.yaml": text})


FAULTS = (
    # the command line
    Fault(
        "a misspelt step",
        "plan rl/nemo_rl/rlfh -c tiny",
        "E110",
        "did you mean 'rl/nemo_rl/rlhf' or 'rl/nemo_rl/rlvr'?",
    ),
    Fault("a misspelt command", "plna toy/make", "E120", "did you mean 'plan'?"),
    Fault("a misspelt flag", "run --dryrun toy/make", "E120", "did you mean '--dry-run'?"),
    Fault("a flag that there is not", "plan toy/train -c tiny --model X", "E120", "steps plan --help"),
    Fault("a flag before the command", "--home here runs", "E120", "steps runs --home here"),
    Fault("a misspelt stage", "run toy_all --until trian", "E120", "--until train"),
    Fault("a misspelt environment", "env show mcqaa", "E110", "steps env show mcqa"),
    Fault(
        "an artifact that is not there",
        "artifacts show toy/make/row",
        "E110",
        "steps artifacts show toy/make/rows",
        setup=on.after("run toy/make"),
    ),
    Fault(
        "a run that is not there",
        "status mine",
        "E110",
        "steps runs",
        setup=on.after("run toy/make"),
    ),
    Fault("no run yet", "status", "E110", "steps run data_prep/rl_prep -c tiny   # makes one, in seconds", again=True),
    # configs
    Fault("a config that the step lacks", "plan rl/nemo_rl/rlvr -c tny", "E200", "-c tiny"),
    Fault(
        "a config of another name",
        f"plan rl/nemo_rl/rlvr -c vllm {OWN}",
        "E200",
        "steps show rl/nemo_rl/rlvr   # its configs",
    ),
    Fault(
        "a key that is near to one of another meaning",
        f"plan {RLVR} loss_fn.kl=0.1",
        "E200",
        "steps show rl/nemo_rl/rlvr",
    ),
    Fault(
        "a config file that is not there",
        "plan toy/train -c ./mine.yml",
        "E200",
        "did you mean 'mine.yaml'?",
        setup=own_config("defaults: [tiny]\n"),
    ),
    Fault(
        "a misspelt key",
        f"plan {RLVR} grpo.num_promts_per_step=4",
        "E200",
        "grpo.num_prompts_per_step=4",
    ),
    Fault(
        "a misspelt key in a file",
        "plan toy/train -c mine.yaml",
        "E200",
        "sed -i '2s/\\bstep\\b/steps/' mine.yaml   # corrects the key",
        setup=own_config("defaults: [tiny]\nstep: 2\n"),
    ),
    Fault(
        "a number with commas",
        f"plan {RLVR} grpo.max_num_steps='1,000'",
        "E200",
        "grpo.max_num_steps=1000",
    ),
    Fault(
        "none of the choices",
        f"plan {RLVR} policy.generation.backend=embeded",
        "E200",
        "policy.generation.backend=embedded",
    ),
    Fault(
        "an override that does not parse",
        f"plan {RLVR} 'checkpointing.metric_name=reward{{mean'",
        "E200",
        "\"checkpointing.metric_name='reward{mean'\"   # quotes special characters",
    ),
    Fault(
        "a comma where a list is meant",
        "plan toy/train -c tiny passthrough=a,b",
        "E200",
        "'passthrough=[a,b]'   # a list",
    ),
    Fault("a setting that nothing reads", f"plan {RLVR} grpo.val_start_at=5", "E200", "grpo.val_start_at=-1"),
    Fault(
        "a variable that is not set",
        "plan toy/train -c mine.yaml",
        "E200",
        "export STEPS_OF_MINE=VALUE",
        setup=own_config("defaults: [tiny]\nsteps: ${oc.env:STEPS_OF_MINE}\n"),
        put={"VALUE": "3"},
    ),
    Fault(
        "a variable that is not set, in a longer text",
        f"plan {RLVR} 'checkpointing.metric_name=${{oc.env:STEPS_OF_MINE}}/mean'",
        "E200",
        "export STEPS_OF_MINE=VALUE",
        put={"VALUE": "reward"},
    ),
    # what goes into a step
    Fault(
        "a misspelt input",
        f"plan {RLVR} --input prompt=rows.jsonl",
        "E305",
        "--input prompts=rows.jsonl",
        setup=on.questions(),
    ),
    Fault(
        "two inputs after one --input",
        "plan rl/nemo_rl/rlvr -c one_gpu --input policy=model prompts=rows.jsonl grpo.max_num_steps=3",
        "E200",
        "--input prompts=rows.jsonl",
        setup=on.together(on.model(), on.questions()),
    ),
    Fault(
        "an input of a pipeline's stage without --input",
        "plan toy_all train.rows=toy/make/rows:v1",
        "E200",
        "--input train.rows=toy/make/rows:v1",
        setup=on.after("run toy/make"),
    ),
    Fault(
        "a file that is not there",
        f"plan {RLVR} --input prompts=row.jsonl",
        "E400",
        "did you mean 'rows.jsonl'?",
        setup=on.questions(),
    ),
    Fault(
        "nothing feeds an input",
        "plan toy/train",
        "E303",
        "--input rows=PATH",
        put={"PATH": "toy/make/rows:v1"},
        setup=on.after("run toy/make"),
    ),
    Fault(
        "an artifact of another type",
        f"plan {RLVR} --input policy=toy/make/rows:v1",
        "E301",
        "steps plan sft/megatron_bridge rl/nemo_rl/rlvr",
        "E303",
        setup=on.after("run toy/make"),
    ),
    Fault(
        "rows of another kind",
        "plan sft/megatron_bridge -c tiny --input chats=rows.jsonl",
        "E301",
        "steps plan data_prep/sft_prep sft/megatron_bridge",
        "E307",
        setup=on.questions(),
    ),
    Fault(
        "steps that do not fit",
        "plan data_prep/rl_prep rl/nemo_rl/dpo",
        "E301",
        "steps plan data_prep/preference_prep rl/nemo_rl/dpo",
        "E303",
    ),
    Fault(
        "a placeholder left in",
        "plan data_prep/rl_prep rows.validation=0 jsonl.path=/path/to/rows.jsonl",
        "E307",
        "jsonl.path=VALUE",
        setup=on.questions(),
        put={"VALUE": "rows.jsonl"},
    ),
    Fault(
        "a pipeline begun in the middle",
        "run toy_all --from score",
        "E303",
        "--from make   # makes it",
        pasted=1,
    ),
    Fault(
        "a damaged artifact",
        "run toy/train --input rows=toy/make/rows:v1",
        "E400",
        "steps run toy/make --force   # makes it again; with the config of `steps status RUN`",
        setup=on.damaged,
        again=True,
    ),
    # rows
    Fault("a few broken rows", PREP, "E410", "max_refused_share=0.03", setup=on.questions(2, expected_answer=None)),
    Fault(
        "a file cut off in its last line",
        PREP,
        "E410",
        "sed -i.bak 101d rows.jsonl   # takes it out; rows.jsonl.bak stays",
        setup=on.cut_off,
    ),
    Fault(
        "rows of another shape, given to the preparation of prompts",
        PREP,
        "E410",
        "steps run data_prep/import_prompts --input dataset=rows.jsonl prompt_column=text",
        setup=on.files({"rows.jsonl": '{"label": "2", "text": "1 + 1?"}\n'}),
    ),
    Fault(
        "rows for an unknown environment",
        PREP,
        "E410",
        "check_environments=false",
        setup=on.questions(100, agent_ref={"name": "my_own"}),
    ),
    # batches, layouts, models
    Fault(
        "batches that do not divide",
        f"plan {RLVR} cluster.backend=ray cluster.policy_workers=3",
        "E309",
        "policy.train_global_batch_size=120 grpo.num_prompts_per_step=15",
    ),
    Fault(
        "a layout that does not divide",
        f"plan rl/nemo_rl/rlvr -c one_node {OWN} policy.megatron_cfg.tensor_model_parallel_size=3",
        "E310",
        "policy.megatron_cfg.tensor_model_parallel_size=2",
        setup=on.together(on.model(), on.questions()),
    ),
    Fault(
        "lengths beyond the model's",
        f"plan {RLVR} --input policy=model policy.max_total_sequence_length=16384",
        "E310",
        "policy.max_total_sequence_length=8192",
        setup=on.model(),
    ),
    Fault(
        "a rotary scaling that is not computed",
        f"plan {RLVR} --input policy=model",
        "E312",
        "--input policy=PATH   # a model with one of these",
        setup=on.model(rope_scaling={"rope_type": "dynamic", "factor": 2.0}, rope_parameters=None),
        put={"PATH": "plain"},
    ),
    Fault(
        "a mixture of experts under the embedded generator",
        f"plan {RLVR} --input policy=model",
        "E312",
        "policy.generation.backend=vllm",
        setup=on.model(family="qwen3_moe"),
    ),
    Fault(
        "a model without a chat template",
        f"plan {RLVR} --input policy=model",
        "E312",
        "cp TEMPLATE.jinja model/chat_template.jinja   # of the model it was made from, or of its family",
        put={"TEMPLATE.jinja": "family.jinja"},
        setup=on.model(template=False),
    ),
    Fault(
        "a quantised checkpoint",
        f"plan {RLVR} --input policy=model",
        "E312",
        "--input policy=PATH   # the model that it was quantised from",
        setup=on.model(quantised=True),
        put={"PATH": "whole"},
    ),
    Fault(
        "no GPU",
        f"run rl/nemo_rl/rlvr -c one_gpu {OWN} {SMALL} policy.generation.backend=embedded",
        "E500",
        "-c cpu   # the step's config for a machine without GPUs",
        setup=on.together(on.without_gpus, on.model(), on.questions()),
    ),
    Fault(
        "no GPU, and no config for CPU",
        "run sft/megatron_bridge -c one_gpu --input model=model --input chats=chats.jsonl sft.max_num_steps=1 "
        "policy.train_global_batch_size=4",
        "E500",
        "cluster.backend=process cluster.gpus_per_node=0   # one process, on CPU",
        setup=on.together(on.without_gpus, on.model(), CHATS),
    ),
    Fault(
        "neither a GPU nor vLLM",
        f"run rl/nemo_rl/rlvr -c one_gpu {OWN} {SMALL}",
        "E500",
        "-c cpu   # the step's config for a machine without GPUs",
        setup=on.together(on.without_gpus, on.without_package("vllm"), on.model(), on.questions()),
    ),
    Fault(
        "a package that is not installed",
        f"run {RLVR} {OWN} {SMALL} policy.generation.backend=vllm",
        "E500",
        "policy.generation.backend=embedded   # does without",
        setup=on.together(on.without_package("vllm"), on.model(), on.questions()),
        pasted=1,
    ),
    # rewards and judges
    Fault(
        "a reward function that is not there",
        f"plan {RLVR} reward=rewards.py:scor",
        "E200",
        "reward=rewards.py:score",
        setup=REWARDS,
    ),
    Fault(
        "a reward file that is not there",
        f"plan {RLVR} reward=reward.py:score",
        "E200",
        "reward=rewards.py:score",
        setup=REWARDS,
    ),
    Fault(
        "a reward file without a function",
        f"plan {RLVR} reward=rewards.py",
        "E200",
        "reward=rewards.py:score",
        setup=REWARDS,
    ),
    Fault(
        "a reward function written like a module's",
        f"plan {RLVR} reward=rewards.score",
        "E200",
        "reward=rewards.py:score",
        setup=REWARDS,
    ),
    Fault(
        "one of two reward functions that is not there",
        f"plan {RLVR} 'reward=[{{function: json:dumps, weight: 0.5}},rewards.py:scor]'",
        "E200",
        "'reward=[{function:json:dumps,weight:0.5},rewards.py:score]'",
        setup=REWARDS,
    ),
    Fault(
        "rows without a column that is known as a prompt",
        f"plan rl/nemo_rl/rlvr -c cpu {OWN} reward=rewards.py:score",
        "E400",
        "steps run data_prep/import_prompts --input dataset=rows.jsonl prompt_column=text"
        "   # then --input prompts=data_prep/import_prompts/prompts",
        setup=on.together(on.model(), on.files({"rows.jsonl": '{"label": 2, "text": "1 + 1?"}\n'}), REWARDS),
    ),
    Fault(
        "a table without a column that is known as a prompt",
        "run rl/nemo_rl/rlvr -c cpu --input policy=model --input prompts=rows.csv reward=rewards.py:score",
        "E410",
        "steps run data_prep/import_prompts --input dataset=rows.csv prompt_column=text"
        "   # then --input prompts=data_prep/import_prompts/prompts",
        setup=on.together(on.model(), on.files({"rows.csv": "label,text\n2,1 + 1?\n"}), REWARDS),
    ),
    Fault(
        "rows that nothing grades",
        f"plan rl/nemo_rl/rlvr -c cpu {OWN}",
        "E304",
        "reward=FILE.py:FUNCTION",
        setup=on.together(on.model(), on.plain_rows, REWARDS),
        put={"FILE.py:FUNCTION": "rewards.py:score"},
    ),
    Fault(
        "a judge that does not answer",
        f"env verify math_with_judge rows.jsonl --judge http://127.0.0.1:{on.PORT}/v1",
        "E700",
        "--judge http://HOST:PORT/v1   # of a server that answers",
        "E410",
        setup=on.together(on.questions(), on.judge_elsewhere),
        put={"HOST:PORT": f"127.0.0.1:{on.OTHER_PORT}"},
    ),
    # the machine
    Fault("an unwritable home", "run toy/make --home /proc/home", "E610", "--home DIR", put={"DIR": "elsewhere"}),
    Fault(
        "a full disk",
        "run toy/make count=100000 --home small",
        "E610",
        "--home DIR   # on a larger disk",
        setup=on.full_disk,
        put={"DIR": "elsewhere"},
    ),
    Fault(
        "a port in use", f"env serve mcqa --port {on.PORT}", "E500", "--port 0   # any free port", setup=on.port_taken
    ),
    Fault(
        "an unknown profile",
        "run toy/make -r my_local",
        "E110",
        "printf '\\n[my_local]\\nexecutor = \"local\"\\n' >> env.toml   # docs/executors.md has every executor",
    ),
    Fault(
        "a misspelt profile",
        "run toy/make -r cluter",
        "E110",
        "-r cluster",
        setup=profile('[cluster]\nexecutor = "local"\n'),
    ),
    Fault(
        "a misspelt key of a profile",
        "run toy/make -r cluster -d",
        "E200",
        "sed -i '3s/\\bpartitoin\\b/partition/' env.toml   # corrects the key",
        setup=profile('[cluster]\nexecutor = "slurm"\npartitoin = "gpu"\n'),
    ),
    Fault(
        "W&B without a key",
        "run toy/make",
        "warning",
        "export WANDB_MODE=offline   # `wandb sync` sends it later",
        setup=on.mirrored_by_wandb,
    ),
    Fault(
        "a misspelt key of a manifest",
        "show mine/step",
        "E100",
        "sed -i '4s/\\bcategroy\\b/category/' manifests/mine.toml   # corrects the key",
        setup=on.files({"manifests/mine.toml": '[step]\nid = "mine/step"\nname = "Mine"\ncategroy = "x"\n'}),
    ),
    # runs
    Fault("Ctrl-C in a pipeline", "run toy_all train.end=interrupt_once", "E800", "steps run --resume RUN"),
    Fault(
        "a loss that is not finite",
        "run toy/train -c tiny end=diverge",
        "E600",
        "optimizer.lr=0.01   # diverged: Lower the learning rate.",
    ),
    Fault("resuming a run that is at work", "run --resume latest", "E010", "steps watch RUN", setup=on.at_work),
    Fault("cancelling a finished run", "cancel latest", "E010", "steps status RUN", setup=on.after("run toy/make")),
    Fault(
        "resuming a run that had a secret",
        "run --resume latest",
        "E010",
        "steps run --resume RUN toy/train -c tiny 'judge.api_key=***'   # with the secret again",
        setup=on.after(f"run {SECRET}"),
        put={"***": "sk-abcdefghijklmnop"},
    ),
)
