"""What a config asks of a model that the model was not made for: longer sequences, chats, tokens that it lacks.

Not here: the lengths that a policy is trained at (constraints.py), which smaller layouts go along with.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from nemotron_steps.config.families import FAMILIES, ROPE_TYPES
from nemotron_steps.config.layout.model_spec import ModelSpec
from nemotron_steps.config.layout.parallel_config import JUDGE_ROLES, JUDGES

POLICY = "policy.checkpoint"
_SET_END = (
    "import sys, json, pathlib; p = pathlib.Path(sys.argv[1], 'tokenizer_config.json'); "
    "p.write_text(json.dumps({**json.loads(p.read_text()), 'eos_token': sys.argv[2]}, indent=2))"
)
"""Takes the model's folder and its end token."""
LENGTHS: dict[str, tuple[str, ...]] = {
    POLICY: (),
    "model": (
        "evaluation.max_total_sequence_length",
        "generation.max_new_tokens",
        "difficulty.max_total_sequence_length",
    ),
    **{
        f"{JUDGES}.{role}.responses_api_models.vllm_model.model": (
            f"{JUDGES}.{role}.responses_api_models.vllm_model.max_total_sequence_length",
        )
        for role in JUDGE_ROLES
    },
}
"""Key of a model that reads or writes chats → keys that say how long they may be; see `lengths_of`."""


@dataclass(frozen=True)
class LimitViolation:
    """Something that a model was not made for; `key` is the config key at fault."""

    what: str
    key: str
    expected: str
    found: str
    hints: tuple[str, ...]


def lengths_of(model_key: str) -> tuple[str, ...] | None:
    """Keys that say how long the chats of a model may be; None where it reads and writes none. `models.NAME` is one of
    several that are each asked what a `model` is."""
    return LENGTHS.get("model" if model_key.startswith("models.") else model_key)


def template_file(folder: str | None) -> str:
    """Where the chat template of a model is, as a shell takes it; `folder`: with its tokenizer, None where unknown."""
    return shlex.quote(f"{folder or 'MODEL'}/chat_template.jinja")


def limit_violations(
    model_key: str, port: str, model: ModelSpec, get: Callable[[str], Any], folder: str | None = None
) -> Iterator[LimitViolation]:
    """What a config asks of one of its models that the model was not made for.

    Args:
        model_key: one with `lengths_of`.
        port: the input that the model comes from.
        get: dotted key → value of the config, or None.
        folder: of the user's, with the model's config.json and tokenizer; None where there is none.
    """
    lengths = {key: get(key) for key in lengths_of(model_key) or ()}
    longer = [key for key, length in lengths.items() if type(length) is int and length > (model.positions or length)]
    if longer:
        yield LimitViolation(
            f"the model of '{port}' has fewer positions than the longest sequence asked of it",
            longer[0],
            f"at most {model.positions}",
            ", ".join(f"{key}={lengths[key]}" for key in longer),
            (" ".join(f"{key}={model.positions}" for key in longer),),
        )
    yield from _uncomputed(model_key, port, model, get)
    # A judge that vLLM serves is never trained, and vLLM reads what is quantised.
    served = model_key.endswith(".vllm_model.model") and get(f"{model_key.rpartition('.')[0]}.backend") == "vllm"
    if model.quantised is not None and not served:
        whole = shlex.quote(f"{folder or 'MODEL'}-BF16")
        yield LimitViolation(
            f"the model of '{port}' is quantised, and only whole weights can be converted and trained",
            model_key,
            "bfloat16, float16 or float32 weights",
            f"quantization_config of {model.quantised}",
            (
                f"--input {port}=PATH   # the model that it was quantised from",
                f"hf download MODEL-BF16 --local-dir {whole}   # then --input {port}={whole}",
            ),
        )
    if model.has_chat_template is False:
        yield LimitViolation(
            f"the model of '{port}' has no chat template: its tokenizer cannot write chats",
            model_key,
            "chat_template.jinja, or a chat_template in tokenizer_config.json",
            "neither",
            (
                f"cp TEMPLATE.jinja {template_file(folder)}   # of the model it was made from, or of its family",
                f"--input {port}=PATH   # a model with a chat template",
            ),
        )
    if model.has_end_token is False:
        yield LimitViolation(
            f"the tokenizer of '{port}' has no token that ends an answer",
            model_key,
            "an eos_token in tokenizer_config.json that is one of the tokenizer's tokens",
            "none, or one that it does not have",
            (
                f"python -c {shlex.quote(_SET_END)} {shlex.quote(folder or 'MODEL')} '<|im_end|>'"
                "   # what its template ends a turn with",
                f"--input {port}=PATH   # a model with an end token",
            ),
        )
    if model.tokens is not None and model.vocabulary is not None and model.tokens > model.vocabulary:
        yield LimitViolation(
            f"the tokenizer of '{port}' has tokens that the model has no embedding for",
            model_key,
            f"at most {model.vocabulary} tokens (vocab_size of config.json)",
            str(model.tokens),
            (f"--input {port}=PATH   # a model with its own tokenizer",),
        )


def _uncomputed(model_key: str, port: str, model: ModelSpec, get: Callable[[str], Any]) -> Iterator[LimitViolation]:
    """Layers and positions that whoever trains the model, or generates from it, does not compute."""
    section = {POLICY: "policy.generation"}.get(model_key, "generation")
    section = model_key.rpartition(".")[0] if model_key.endswith(".vllm_model.model") else section
    backend = get(f"{section}.backend")
    if backend == "embedded" and model.model_type in FAMILIES and FAMILIES[model.model_type].kind == "mixture":
        what = f"the embedded generator has no experts of {model.model_type}"
        yield LimitViolation(what, f"{section}.backend", "vllm", "embedded", (f"{section}.backend=vllm",))
    dtensor = model_key == POLICY and get("policy.dtensor_cfg.enabled") is True
    # Known families are read whole before a run, whatever trains them (steps/preflight.py).
    ours = backend == "embedded" or (model_key == POLICY and not (dtensor and model.model_type not in FAMILIES))
    fixed = model.fixed_positions
    if (ours and model.rope_type not in ROPE_TYPES) or (backend == "vllm" and dtensor and "dynamic" in model.rope_type):
        yield LimitViolation(
            f"the rotary scaling of the model of '{port}' is not computed here, or is another one in vLLM",
            model_key,
            f"rope_type {' | '.join(ROPE_TYPES)}",
            model.rope_type,
            (f"--input {port}=PATH   # a model with one of these",),
        )
    elif dtensor and fixed is not None:
        key = "policy.max_total_sequence_length"
        lengths = {each: get(each) for each in (key, f"{key}_end")}
        longer = [key for key, length in lengths.items() if type(length) is int and length > fixed]
        if longer:
            yield LimitViolation(
                f"a row longer than {fixed} positions would change the positions of the rows beside it "
                f"(rope_type {model.rope_type})",
                longer[0],
                f"at most {fixed}",
                ", ".join(f"{key}={lengths[key]}" for key in longer),
                (" ".join(f"{key}={fixed}" for key in longer),),
            )
