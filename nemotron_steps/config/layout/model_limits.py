"""What a config asks of a model that the model was not made for: longer sequences, chats, tokens that it lacks; and
layouts of models that a step does not train: teachers of distillation, and what vLLM generates from.

Not here: what a policy is trained at, and what its own generator cannot do (constraints.py).
"""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemotron_steps.config.families import FAMILIES, ROPE_TYPES
from nemotron_steps.config.layout.constraints import Violation, model_violations
from nemotron_steps.config.layout.model_spec import ModelSpec
from nemotron_steps.config.layout.parallel_config import (
    CUTS,
    JUDGE_ROLES,
    JUDGES,
    ParallelConfig,
    teachers_named,
)
from nemotron_steps.errors import ConfigError

POLICY = "policy.checkpoint"
_SET_END = (
    "import sys, json, pathlib; p = pathlib.Path(sys.argv[1], 'tokenizer_config.json'); "
    "p.write_text(json.dumps({**json.loads(p.read_text()), 'eos_token': sys.argv[2]}, indent=2))"
)
"""Takes the model's folder and its end token."""
_OF_JUDGE = ".responses_api_models.vllm_model"
_LENGTHS: dict[str, tuple[str, ...]] = {
    POLICY: (),
    "model": (
        "evaluation.max_total_sequence_length",
        "difficulty.max_total_sequence_length",
    ),
}
for _role in JUDGE_ROLES:
    _section = f"{JUDGES}.{_role}{_OF_JUDGE}"
    _LENGTHS[f"{_section}.model"] = (f"{_section}.max_total_sequence_length",)


def lengths_of(model_key: str) -> tuple[str, ...] | None:
    """Keys that say how long the chats of a model may be; None where it reads and writes none. `models.NAME` is one of
    several that are each asked what a `model` is."""
    return _LENGTHS.get("model" if model_key.startswith("models.") else model_key)


def template_file(folder: str | None) -> str:
    """Where the chat template of a model is, as a shell takes it; `folder`: with its tokenizer, None where unknown."""
    return shlex.quote(f"{folder or 'MODEL'}/chat_template.jinja")


def limit_violations(
    model_key: str, port: str, model: ModelSpec, get: Callable[[str], Any], folder: str | None = None
) -> Iterator[ConfigError]:
    """What a config asks of one of its models (a key with `lengths_of`) that the model was not made for; `where` is the
    config key at fault. `port`: the input that the model comes from; `folder`: the user's, with its config.json."""
    here, another = shlex.quote(folder or "MODEL"), f"--input {port}=PATH   # "
    what = f"the model of '{port}' has fewer positions than the longest sequence asked of it"
    yield from _too_long(what, lengths_of(model_key) or (), model.positions, get)
    yield from _uncomputed(model_key, port, model, get)
    # A judge that vLLM serves is never trained, and vLLM reads what is quantised.
    served = model_key.endswith(f"{_OF_JUDGE}.model") and get(f"{model_key.rpartition('.')[0]}.backend") == "vllm"
    if model.quantised is not None and not served:
        whole = shlex.quote(f"{folder or 'MODEL'}-BF16")
        what = f"the model of '{port}' is quantised, and only whole weights can be converted and trained"
        expected, found = "bfloat16, float16 or float32 weights", f"quantization_config of {model.quantised}"
        download = f"hf download MODEL-BF16 --local-dir {whole}   # then --input {port}={whole}"
        hints = (f"{another}the model that it was quantised from", download)
        yield ConfigError(what, where=model_key, expected=expected, found=found, hints=hints)
    if model.has_chat_template is False:
        what = f"the model of '{port}' has no chat template: its tokenizer cannot write chats"
        expected = "chat_template.jinja, or a chat_template in tokenizer_config.json"
        copy = f"cp TEMPLATE.jinja {template_file(folder)}   # of the model it was made from, or of its family"
        hints = (copy, f"{another}a model with a chat template")
        yield ConfigError(what, where=model_key, expected=expected, found="neither", hints=hints)
    if model.has_end_token is False:
        what, found = (
            f"the tokenizer of '{port}' has no token that ends an answer",
            "none, or one that it does not have",
        )
        expected = "an eos_token in tokenizer_config.json that is one of the tokenizer's tokens"
        ends = f"python -c {shlex.quote(_SET_END)} {here} '<|im_end|>'   # what its template ends a turn with"
        hints = (ends, f"{another}a model with an end token")
        yield ConfigError(what, where=model_key, expected=expected, found=found, hints=hints)
    if model.tokens is not None and model.vocabulary is not None and model.tokens > model.vocabulary:
        what = f"the tokenizer of '{port}' has tokens that the model has no embedding for"
        expected = f"at most {model.vocabulary} tokens (vocab_size of config.json)"
        hint = f"{another}a model with its own tokenizer"
        yield ConfigError(what, where=model_key, expected=expected, found=str(model.tokens), hints=(hint,))


def _too_long(what: str, keys: Sequence[str], most: int | None, get: Callable[[str], Any]) -> Iterator[ConfigError]:
    """Of keys that say how long sequences may be, all that say more than `most`, in one error."""
    lengths = {key: get(key) for key in keys}
    longer = [key for key, length in lengths.items() if most and type(length) is int and length > most]
    if longer:
        found, hint = ", ".join(f"{key}={lengths[key]}" for key in longer), " ".join(f"{key}={most}" for key in longer)
        yield ConfigError(what, where=longer[0], expected=f"at most {most}", found=found, hints=(hint,))


def _uncomputed(model_key: str, port: str, model: ModelSpec, get: Callable[[str], Any]) -> Iterator[ConfigError]:
    """Layers and positions that whoever trains the model, or generates from it, does not compute."""
    section = "policy.generation" if model_key == POLICY else "generation"
    section = model_key.rpartition(".")[0] if model_key.endswith(f"{_OF_JUDGE}.model") else section
    backend = get(f"{section}.backend")
    known = FAMILIES.get(model.model_type)
    if backend == "embedded" and known is not None and known.kind == "mixture":
        what = f"the embedded generator has no experts of {model.model_type}"
        hints = (f"{section}.backend=vllm",)
        yield ConfigError(what, where=f"{section}.backend", expected="vllm", found="embedded", hints=hints)
    dtensor = model_key == POLICY and get("policy.dtensor_cfg.enabled") is True
    # Known families are read whole before a run, whatever trains them (steps/preflight.py).
    ours = backend == "embedded" or (model_key == POLICY and not (dtensor and known is None))
    if (ours and model.rope_type not in ROPE_TYPES) or (backend == "vllm" and dtensor and "dynamic" in model.rope_type):
        what = f"the rotary scaling of the model of '{port}' is not computed here, or is another one in vLLM"
        expected, hints = f"rope_type {' | '.join(ROPE_TYPES)}", (f"--input {port}=PATH   # a model with one of these",)
        yield ConfigError(what, where=model_key, expected=expected, found=model.rope_type, hints=hints)
    elif dtensor and model.fixed_positions is not None:
        what = f"a row longer than {model.fixed_positions} positions would change the positions of the rows beside it"
        key = "policy.max_total_sequence_length"
        yield from _too_long(f"{what} (rope_type {model.rope_type})", (key, f"{key}_end"), model.fixed_positions, get)


@dataclass(frozen=True)
class VllmKeys:
    """Where a config says how vLLM generates."""

    backend: str
    width: str
    experts: str | None = None


@dataclass(frozen=True)
class ModelViolations:
    """What one layout violates of one model, or of several that share it, under the config's own keys: of teachers by
    name, or of models by key."""

    models: tuple[str, ...]
    violations: tuple[Violation, ...]

    @property
    def teachers(self) -> str:
        """The teachers, in words."""
        return teachers_named(self.models)


def teacher_violations(sizes: ParallelConfig, models: Mapping[str, ModelSpec]) -> Iterator[ModelViolations]:
    """Teachers whose models their layouts, their own or the policy's, do not fit, by the name of each whose model is
    known. What is wrong with a layout is reported once for all teachers."""
    alike: dict[frozenset[str], dict[str, list[Violation]]] = {}
    for name, model in models.items():
        own = next((teacher for teacher in sizes.teachers if teacher.name == name), None)
        cuts = {cut: getattr(own or sizes, cut) for cut in (*CUTS, "sequence_parallel")}
        named = {} if own is None else {name: own.key(name) for name in cuts}
        per_node = (own and own.gpus_per_node) or sizes.gpus_per_node
        found = [*model_violations(ParallelConfig(**cuts, gpus_per_node=per_node, named=named), model)]
        if found:
            alike.setdefault(frozenset(violation.key for violation in found), {})[name] = found
    for teachers in alike.values():
        yield ModelViolations(tuple(teachers), tuple(each for found in teachers.values() for each in found))


def vllm_keys(model_key: str, get: Callable[[str], Any]) -> VllmKeys | None:
    """Settings of the vLLM that generates from the model which a config key names; None where something else does, or a
    policy's generator."""
    section, _, name = model_key.rpartition(".")
    if model_key.partition(".")[0] in ("model", "models"):
        cfg = "generation.vllm_cfg"
        keys = VllmKeys("generation.backend", f"{cfg}.tensor_parallel_size", f"{cfg}.expert_parallel_size")
    elif name == "model" and section in (f"{JUDGES}.{role}.responses_api_models.vllm_model" for role in JUDGE_ROLES):
        keys = VllmKeys(f"{section}.backend", f"{section}.tensor_parallel_size")
    else:
        return None
    return keys if get(keys.backend) == "vllm" else None


def vllm_violations(models: Mapping[str, ModelSpec], get: Callable[[str], Any]) -> Iterator[ModelViolations]:
    """What vLLM cannot do with models, each under the config key that names it; once for all that share settings."""
    found: dict[VllmKeys, dict[str, list[Violation]]] = {}
    for model_key, model in models.items():
        keys = vllm_keys(model_key, get)
        if keys is None:
            continue
        width, experts = (get(key) if key else None for key in (keys.width, keys.experts))
        sizes = ParallelConfig(
            uses_vllm=True,
            generator_width=width if type(width) is int and width > 0 else 1,
            generator_experts=experts if type(experts) is int and experts > 0 else 1,
            named={"uses_vllm": keys.backend, "generator_width": keys.width, "generator_experts": keys.experts or ""},
        )
        wrong = [*model_violations(sizes, model)]
        if wrong:
            found.setdefault(keys, {})[model_key] = wrong
    for alike in found.values():
        together = dict.fromkeys(each for wrong in alike.values() for each in wrong)
        yield ModelViolations(tuple(alike), tuple(together))
