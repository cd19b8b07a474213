"""The task that every GRPO engine of the benchmarks trains on: a Qwen3, a set of prompts, one reward.

The reward is the share of the answer's characters that are vowels: dense, rule-based, and learnable from random weights
within a few dozen steps.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import threading
import time
from pathlib import Path

VOWELS = frozenset("aeiou")
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def reward_of(text: str) -> float:
    """Share of vowels among the characters of an answer; 0 for an empty one."""
    return sum(c in VOWELS for c in text) / len(text) if text else 0.0


def large_prompts(folder: Path, count: int, words: int = 60, seed: int = 0) -> list[str]:
    """Prompts of `words` tokens out of the large checkpoint's vocabulary."""
    vocabulary = sorted(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])[10:]
    rng = random.Random(seed)
    return [" ".join(rng.choice(vocabulary) for _ in range(words)) for _ in range(count)]


def prompts(count: int, seed: int = 0) -> list[str]:
    """Words to answer to, about 20 characters each."""
    rng = random.Random(seed)
    return ["say " + "".join(rng.choice("bcdfghjklmnpqrstvwxyz ") for _ in range(16)) for _ in range(count)]


def make_checkpoint(folder: Path, seed: int = 0) -> None:
    """A 0.6 M-parameter Qwen3 with random float32 weights and a character tokenizer, as a Hugging Face folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<|pad|>", "<|im_start|>", "<|im_end|>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    _write(folder, _fast(tokenizer), SHAPE, "float32", seed)


class PeakMemory:
    """Most GPU memory in use at once, whichever processes have it; looked at every 20 ms. None without a GPU."""

    peak_gib: float | None = None

    def __enter__(self) -> PeakMemory:
        import torch

        self.timeline: list[tuple[float, float]] = []
        """(seconds, GiB) of every look."""
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)
        if torch.cuda.is_available():
            self._watch.start()
        return self

    def _look(self) -> None:
        import torch

        while not self._ended.wait(0.02):
            free, whole = torch.cuda.mem_get_info()
            used = (whole - free) / 2**30
            self.peak_gib = max(self.peak_gib or 0.0, used)
            self.timeline.append((time.perf_counter(), used))

    def last(self, seconds: float, parts: int = 60) -> list[float]:
        """The most of each of `parts` stretches of the last seconds: which phase takes what."""
        if not self.timeline:
            return []
        begin = self.timeline[-1][0] - seconds
        peaks = [0.0] * parts
        for at, used in self.timeline:
            if at >= begin:
                part = min(parts - 1, int((at - begin) / seconds * parts))
                peaks[part] = max(peaks[part], round(used, 1))
        return peaks

    def __exit__(self, *_: object) -> None:
        self._ended.set()


def make_large_checkpoint(folder: Path, layers: int = 28, hidden: int = 1024) -> None:
    """`write_large_checkpoint` in a process of its own, which gives its GPU memory back."""
    maker = multiprocessing.get_context("spawn").Process(target=write_large_checkpoint, args=(folder, layers, hidden))
    maker.start()
    maker.join()
    if maker.exitcode:
        raise SystemExit("the checkpoint could not be made")


def word_tokenizer(size: int, seed: int = 0):
    """A fast tokenizer of `size` tokens, nearly all of them made-up words of six letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    rng = random.Random(seed)
    words = {"".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(6)) for _ in range(size + 1_000)}
    special = ["<|pad|>", "<|im_start|>", "<|im_end|>", "user", "assistant", "<unk>"]
    vocab = {token: i for i, token in enumerate([*special, *sorted(words)][:size])}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return _fast(tokenizer)


def write_large_checkpoint(folder: Path, layers: int, hidden: int, seed: int = 0) -> None:
    """A Qwen3 of 0.47 B parameters (by default) with random bfloat16 weights and 32,000 made-up words."""
    shape = {
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 128,
        "head_dim": 128,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }
    _write(folder, word_tokenizer(32_000), shape, "bfloat16", seed)


def _fast(tokenizer):
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = TEMPLATE
    return fast


def _write(folder: Path, fast, shape: dict, dtype: str, seed: int) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    fast.save_pretrained(folder)
    torch.manual_seed(seed)
    config = Qwen3Config(
        **{**shape, "vocab_size": len(fast)},
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
        bos_token_id=None,
    )
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(folder)


def write_rows(path: Path, texts: list[str]) -> None:
    """Prompts as rows of the vowels environment."""
    with path.open("w") as file:
        for text in texts:
            row = {
                "responses_create_params": {"input": [{"role": "user", "content": text}]},
                "agent_ref": {"type": "responses_api_agents", "name": "vowels"},
            }
            file.write(json.dumps(row) + "\n")
