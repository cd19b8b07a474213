"""Train a small tokenizer for models that start from nothing: bytes, plus the phrases a data set keeps repeating. A
task's wording ("Spell this word backward (example: sun -> nus): ") becomes one token, while letters and digits stay one
token each, so a small model sees short sequences and never has to learn how a word is spelt. Not for language
modelling: natural text costs about one token a byte."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemotron_steps.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD = "<|pad|>"
END = "<|end|>"
ROLES = ("system", "user", "assistant", "tool")
SPECIAL_TOKENS = (PAD, END, *(f"<|{role}|>" for role in ROLES))
"""Never produced by tokenising text inside a message that the template has escaped, and left out when decoding."""

MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Always one token each, and kept when decoding: readers of an assistant turn look for them."""

CHAT_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content -%}{%- for part in content -%}{{ part.text or '' }}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- if tools -%}
<|system|>Tools:{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
Call one by writing <tool_call>{"name": NAME, "arguments": {...}}</tool_call>.<|end|>
{%- endif -%}
{%- for message in messages -%}
{%- if message.role not in ['system', 'user', 'assistant', 'tool'] -%}
{{- raise_exception('unknown role ' ~ message.role) -}}
{%- endif -%}
{{- '<|' ~ message.role ~ '|>' -}}
{%- if message.reasoning_content -%}{{- '<think>' ~ message.reasoning_content ~ '</think>' -}}{%- endif -%}
{{- text(message.content) -}}
{%- for call in message.tool_calls or [] -%}
{%- set call = call.function or call -%}
{{- '<tool_call>' ~ ({'name': call.name, 'arguments': call.arguments} | tojson) ~ '</tool_call>' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""

CONTEXT = 6
"""Atoms before or after a digit that decide whether it belongs to the wording."""

ALWAYS = 0.95
"""A digit belongs to the wording when this share of what stands in its place is the same digit."""

_Context = tuple[str, ...]
_PLACE = ""
"""Where the digit stands in a context; no atom is empty."""

_ATOM = re.compile(r"[A-Za-z]+|\s+|.", re.DOTALL)


def train_tokenizer(
    texts: Sequence[str], *, min_share: float = 0.02, max_phrases: int = 128
) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with a chat template, and as whole tokens the `max_phrases` phrases that shorten `texts`
    most, of those that at least `min_share` of them have. DataError when there is no text."""
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    phrases = [*MARKUP, *(p for p in repeated_phrases(texts, min_share, max_phrases) if p not in MARKUP)]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = [
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        *("".join(piece for piece, _ in byte_level.pre_tokenize_str(phrase)) for phrase in phrases),
    ]
    vocabulary = {piece: index for index, piece in enumerate((*SPECIAL_TOKENS, *dict.fromkeys(pieces)))}
    # No merges: a piece is one token when it is in the vocabulary (a phrase), else its bytes.
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    # Longest phrase first; one that begins or ends with a letter must not cut a longer word.
    pattern = "|".join(
        ("(?<![A-Za-z])" if phrase[0].isalpha() else "")
        + re.escape(phrase)
        + ("(?![A-Za-z])" if phrase[-1].isalpha() else "")
        for phrase in sorted(phrases, key=lambda p: (-len(p), p))
    )
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trained = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[token for token in SPECIAL_TOKENS if token not in (PAD, END)],
        clean_up_tokenization_spaces=False,
        model_max_length=1_000_000,
    )
    trained.chat_template = CHAT_TEMPLATE
    return trained


def template_texts(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """The stretches of text between special tokens of a chat as CHAT_TEMPLATE writes it, with `tools` in the Responses
    shape."""
    from transformers.utils.chat_template_utils import render_jinja_template

    nested: list[Any] = [
        {"type": "function", "function": {key: value for key, value in tool.items() if key not in ("type", "strict")}}
        for tool in tools
    ]
    rendered = render_jinja_template([[dict(m) for m in messages]], tools=nested, chat_template=CHAT_TEMPLATE)
    return [part for part in re.split("|".join(map(re.escape, SPECIAL_TOKENS)), rendered[0][0]) if part]


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(str(folder))


def repeated_phrases(texts: Sequence[str], min_share: float, max_phrases: int) -> list[str]:
    """Stretches of text that at least `min_share` of the texts contain, most saved tokens first. Neighbouring atoms
    that occur together often enough are joined, the most frequent pairs first, as in byte-pair encoding but across word
    boundaries. Content is never joined: words that few texts have, and digits that their surroundings do not determine.
    A single word is not a phrase: it could be content too."""
    if not texts:
        raise DataError("no text to train a tokenizer on", expected="at least one chat")
    threshold = max(2.0, min_share * len(texts))
    atoms_of = [_ATOM.findall(text) for text in texts]
    shares = Counter(atom for atoms in atoms_of for atom in set(atoms))
    wording = {atom for atom, count in shares.items() if count >= threshold and not atom.isdigit()}
    # What precedes or follows a digit, where that is frequent and (almost) always beside the same digit.
    digits: dict[_Context, Counter[str]] = defaultdict(Counter)
    for atoms in atoms_of:
        for place, atom in enumerate(atoms):
            for context in _contexts(atoms, place) if atom.isdigit() else ():
                digits[context][atom] += 1
    frequent = {context: found for context, found in digits.items() if found.total() >= threshold}
    fixed = {context for context, found in frequent.items() if max(found.values()) >= ALWAYS * found.total()}
    # Texts that differ in content alone become one pattern, so the joining below walks a handful of them.
    patterns = Counter(_pattern(atoms, wording, fixed) for atoms in atoms_of)
    sequences = [(list(pattern), count) for pattern, count in patterns.items()]
    while pairs := _most_frequent(sequences, threshold):
        sequences = [(_join(sequence, pairs), count) for sequence, count in sequences]
    saved: Counter[str] = Counter()
    for sequence, count in sequences:
        for piece in sequence:
            if piece is not None and not piece.strip().isalnum() and len(piece.encode()) > 1:
                saved[piece] += count * (len(piece.encode()) - 1)
    return [piece for piece, _ in sorted(saved.items(), key=lambda item: (-item[1], item[0]))[:max_phrases]]


def _contexts(atoms: Sequence[str], place: int) -> tuple[_Context, _Context]:
    before = tuple(atoms[max(0, place - CONTEXT) : place])
    after = tuple(atoms[place + 1 : place + 1 + CONTEXT])
    return (*before, _PLACE), (_PLACE, *after)


def _pattern(atoms: Sequence[str], wording: set[str], fixed: set[_Context]) -> tuple[str | None, ...]:
    """The atoms with every run of content as one None."""
    kept: list[str | None] = []
    for place, atom in enumerate(atoms):
        if not fixed.isdisjoint(_contexts(atoms, place)) if atom.isdigit() else atom in wording:
            kept.append(atom)
        elif not kept or kept[-1] is not None:
            kept.append(None)
    return tuple(kept)


def _most_frequent(sequences: Iterable[tuple[list[str | None], int]], threshold: float) -> set[tuple[str, str]]:
    """Every pair that as many texts have as the most frequent one (the words of one sentence all tie); empty when
    that is below the threshold."""
    counts: Counter[tuple[str, str]] = Counter()
    for sequence, count in sequences:
        for left, right in {(a, b) for a, b in pairwise(sequence) if a is not None and b is not None}:
            counts[left, right] += count
    top = max(counts.values(), default=0)
    return {pair for pair, count in counts.items() if count == top} if top >= threshold else set()


def _join(sequence: list[str | None], pairs: set[tuple[str, str]]) -> list[str | None]:
    """The sequence with neighbours that are one of `pairs` joined, left to right."""
    joined: list[str | None] = []
    place = 0
    while place < len(sequence):
        left, right = sequence[place], sequence[place + 1] if place + 1 < len(sequence) else None
        if left is not None and right is not None and (left, right) in pairs:
            joined.append(left + right)
            place += 2
        else:
            joined.append(left)
            place += 1
    return joined
