"""Overrides that a manifest suggests: plain `key=value`, or relative to what the run used.

`loss_fn.reference_policy_kl_penalty*=10|0.001` means ten times the run's own value, or 0.001 where it is 0, unset or
not a number. `/=` divides. `weight_decay<=0.1` and `threshold>=2` bring a number that is beyond the bound back to it.
Longer answers come with a longer sequence where that would cut them off. The result is always a plain override that can
be pasted, and none where the run had that value. Integers stay integers (at least 1 after a division).
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

_BOUND = re.compile(r"(?P<key>[^\s=*/|<>]+)(?P<op>[<>])=(?P<bound>[0-9.eE+-]+)")
_RELATIVE = re.compile(r"(?P<key>[^\s=*/|]+)(?P<op>[*/])=(?P<factor>[0-9.eE+-]+)\|(?P<fallback>\S+)")
_ANSWER = "policy.generation.max_new_tokens"
_LENGTHS = ("policy.max_total_sequence_length", "policy.max_total_sequence_length_end")
_BUDGETS = [f"policy.{s}.{n}_mb_tokens" for s in ("sequence_packing", "dynamic_batching") for n in ("train", "logprob")]


def lookup(config: Mapping[str, Any], dotted: str) -> Any:
    """The value of a dotted key; None when any part of it is missing."""
    value: Any = config
    for part in dotted.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def resolved_overrides(texts: Iterable[str], config: Mapping[str, Any]) -> tuple[str, ...]:
    """The plain `key=value` form of a manifest's overrides, those that change something in a run with this config."""
    if lookup(config, "policy.dtensor_cfg.enabled") is True:  # has an optimizer of its own, and nothing of megatron's
        own = (text.replace("policy.megatron_cfg.optimizer.lr", "policy.optimizer.kwargs.lr") for text in texts)
        texts = [text for text in own if not text.startswith("policy.megatron_cfg.")]
    found = [plain.partition("=") for plain in (resolve_override(text, config) for text in texts) if plain]
    answer, longest = lookup(config, _ANSWER), lookup(config, _LENGTHS[0])
    for value in [int(v) for k, _, v in found if k == _ANSWER and isinstance(answer, int) and isinstance(longest, int)]:
        if value > answer and 2 * value > longest:  # else there is room for prompts
            grown = {key: str(lookup(config, key) + value - answer) for key in _LENGTHS if lookup(config, key)}
            most = max(grown.values(), key=int)
            found += [(k, "=", v) for k, v in grown.items()]
            found += [(k, "=", most) for k in _BUDGETS if 0 < (lookup(config, k) or 0) < int(most)]
    return tuple(f"{k}{is_}{v}" for k, is_, v in found if str(lookup(config, k)).lower() != v.lower())


def resolve_override(text: str, config: Mapping[str, Any]) -> str:
    """One override in its plain form; empty where a bound is kept."""
    bounded = _BOUND.fullmatch(text)
    if bounded is not None:
        current, bound = lookup(config, bounded["key"]), float(bounded["bound"])
        beyond = isinstance(current, int | float) and (current > bound if bounded["op"] == "<" else current < bound)
        return f"{bounded['key']}={bounded['bound']}" if beyond else ""
    match = _RELATIVE.fullmatch(text)
    if match is None:
        return text
    key, factor = match["key"], float(match["factor"])
    current = lookup(config, key)
    if not isinstance(current, int | float) or isinstance(current, bool) or current == 0:
        return f"{key}={match['fallback']}"
    value = current * factor if match["op"] == "*" else current / factor
    if isinstance(current, int):
        return f"{key}={max(1, round(value))}"
    return f"{key}={value:.6g}"


def is_override(text: str) -> bool:
    """Whether a manifest's override is well formed: `key=value`, `+key=value`, `~key`, a bound or the relative form."""
    return bool(
        _RELATIVE.fullmatch(text)
        or _BOUND.fullmatch(text)
        or re.fullmatch(r"(\+{0,2}[^\s=~*/|+<>]+=.*|~[^\s=]+)", text)
    )
