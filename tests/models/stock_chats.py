"""Chat formats with the behaviour of published templates (chat_templates/), over one small tokenizer with merges."""

from functools import cache
from pathlib import Path
from typing import Any

from nemotron_steps.models.chat import ChatFormat

_TEMPLATES = Path(__file__).parent / "chat_templates"

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "qwen3-no-thinking": ("qwen3", {"enable_thinking": False}),
    "qwen3.5": ("qwen3_5", {}),
    "qwen3.5-no-thinking": ("qwen3_5", {"enable_thinking": False}),
    "llama3": ("llama3", {}),
    "nemotron3": ("nemotron_3", {}),
    "nemotron3-no-thinking": ("nemotron_3", {"enable_thinking": False}),
    "nemotron3-keeps-thinking": ("nemotron_3", {"truncate_history_thinking": False}),
}
"""Template and its variables, by the model and mode they stand for."""

TOOLS_OF = {"llama3": "llama3_json", "qwen3": "hermes"}
"""Tool parser of a family's model; the others write qwen3_coder."""


def stock_chat(family: str, *, special_markup: bool = False, eos: str | None = None) -> ChatFormat:
    """The format of one of FAMILIES.

    Args:
        special_markup: the tokenizer calls tags of reasoning and calls special, which the published ones do not.
        eos: the tokenizer's end token, of a base model; None for the one that the template writes.
    """
    name, variables = FAMILIES[family]
    tokenizer = _tokenizer(eos or ("<|eot_id|>" if name == "llama3" else "<|im_end|>"), special_markup)
    tokenizer.chat_template = (_TEMPLATES / f"{name}.jinja").read_text()
    return ChatFormat(tokenizer, family, variables)


def tool_parser_of(family: str) -> str:
    return TOOLS_OF.get(family.split("-")[0], "qwen3_coder")


def _tokenizer(end: str, special_markup: bool):
    from transformers import PreTrainedTokenizerFast

    markup = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    special = ["<|begin_of_text|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    special += ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_trained(), eos_token=end, bos_token="<|begin_of_text|>", additional_special_tokens=special
    )
    tokenizer.add_tokens(markup, special_tokens=special_markup)
    return tokenizer


@cache
def _trained():
    """Byte-level BPE: its merges reach over line ends, so that text cut elsewhere becomes other tokens."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
    from tokenizers.models import BPE

    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = [path.read_text() for path in sorted(_TEMPLATES.glob("*.jinja"))]
    texts += [
        "user\n\nassistant\n\nsystem\n",
        "the answer is\n\nthe result was",
        ' {"name": "add", "arguments": {"by": 1}}\n',
    ]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts * 3, trainer)
    return tokenizer
