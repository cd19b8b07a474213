"""Nearest names: the `did you mean` of every error about an unknown key, step, config or profile."""

import re
from collections.abc import Iterable, Mapping


def nearest(name: str, candidates: Iterable[str], limit: int = 3) -> tuple[str, ...]:
    """Up to `limit` candidates that look like `name`, best first: those that share its last dotted or slashed part,
    then those of which it is a word (`gpu` finds `one_gpu`, and not `cpu`) or that differ by a letter of many."""
    from difflib import SequenceMatcher

    wanted, scored = name.lower(), []
    tail = _tail(wanted)
    for candidate in set(candidates):
        text = candidate.lower()
        same = SequenceMatcher(None, wanted, text).ratio()
        if _tail(text) == tail:
            score = 2.0 + same
        elif wanted in text.split("_") or same >= 0.8:
            score = 1.0 + same
        else:
            score = 0.6 * SequenceMatcher(None, tail, _tail(text)).ratio() + 0.4 * same
        if score >= 0.6:
            scored.append((-score, candidate))
    return tuple(candidate for _, candidate in sorted(scored)[:limit])


def meant(name: str, candidates: Iterable[str], limit: int = 3) -> tuple[str, ...]:
    """As `nearest`, of those that can be pasted in place of `name`: it misspelt, or its last part in full."""
    last = _tail(name.lower())
    near = nearest(name, candidates, limit=10)
    return tuple(each for each in near if misspelt(name, each) or _tail(each.lower()) == last)[:limit]


def by_alias(name: str, aliases: Mapping[str, Iterable[str]]) -> str | None:
    """The step id that `name` is another word for, of id → its aliases; UnknownNameError where it is so for several."""
    from nemotron_steps.errors import UnknownNameError, did_you_mean

    found = [step for step, words in aliases.items() if name.lower() in words]
    if len(found) > 1:
        raise UnknownNameError(f"'{name}' is several steps", expected=" or ".join(found), hints=did_you_mean(found))
    return found[0] if found else None


def misspelt(name: str, right: str) -> bool:
    """Whether one name is the other with slips of the keyboard, and so can be put in its place unasked.

    Word by word, for `max_tokens` and `min_tokens`, `top_k` and `top_p` are near and mean other things; with another
    digit it is another name (`swe1` and `swe2`)."""
    from difflib import SequenceMatcher

    ours, theirs = name.lower().replace("-", "_"), right.lower().replace("-", "_")
    if ours.replace("_", "") == theirs.replace("_", ""):
        return True
    words = [re.split("[_./]", text) for text in (ours, theirs)]
    least = 0.75
    if len(words[0]) != len(words[1]):
        words, least = [[ours], [theirs]], 0.9
    for one, other in zip(*words, strict=True):
        swapped = sorted(one) == sorted(other)
        if not swapped and SequenceMatcher(None, one, other).ratio() < least:
            return False
    return re.findall(r"\d", ours) == re.findall(r"\d", theirs)


def _tail(name: str) -> str:
    return name.replace("/", ".").rsplit(".", 1)[-1]
