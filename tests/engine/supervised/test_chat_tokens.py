"""Which tokens of a chat are an assistant's, whatever the template writes around them."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from nemotron_steps.config.schema.policy import PolicyConfig
from nemotron_steps.engine.losses.supervised import NegativeLogLikelihood
from nemotron_steps.engine.packing import pack
from nemotron_steps.engine.policy.dtensor import DTensorPolicy
from nemotron_steps.engine.policy.megatron import MegatronPolicy
from nemotron_steps.engine.supervised.chat_tokens import (
    ChatSequence,
    PackedRow,
    chat_sequences,
    chats_of,
    read_packed,
    row_of,
)
from nemotron_steps.engine.supervised.training import batch_of
from nemotron_steps.errors import DataError
from nemotron_steps.models.chat import ChatFormat
from nemotron_steps.models.tokenizers import train_tokenizer
from tests.models.checkpoints import write_checkpoint
from tests.models.stock_chats import stock_chat

PLAIN = "{{ m.content }}"
ANSWER = "{{ '[' + m.content + eos_token }}\n"
PROMPT = "{% if add_generation_prompt %}[{% endif %}"
TURNS = [
    {"role": "user", "content": "ask"},
    {"role": "assistant", "content": "one"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "two"},
]


def format_of(answer: str = ANSWER, prompt: str = PROMPT, said: str = PLAIN) -> ChatFormat:
    chat = ChatFormat(train_tokenizer(["ask more one two"] * 3))
    chat.tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}" + answer + "{% else %}" + said + "{% endif %}"
        "{% endfor %}" + prompt
    )
    return chat


def texts(chat: ChatFormat, sequence: ChatSequence) -> list[str]:
    """Of what is trained and what is not, in turn."""
    parts: list[list[int]] = []
    before = None
    for token, bit in zip(sequence.token_ids, sequence.token_mask, strict=True):
        if bit != before:
            parts.append([])
        parts[-1].append(token)
        before = bit
    return [str(chat.tokenizer.decode(part)) for part in parts]


@pytest.mark.parametrize("family", ["qwen3", "llama3"])
def test_a_greeting_that_nothing_asks_for_is_shown_and_not_trained(family: str) -> None:
    chat, greeting = stock_chat(family), {"role": "assistant", "content": "Welcome"}
    (sequence,) = chat_sequences(chat, [greeting, *TURNS[:2]], "f:1", {})
    asked, answer = texts(chat, sequence)
    assert sequence.token_ids[: sequence.token_mask.index(1)] == chat.render([greeting, TURNS[0]])
    assert "Welcome" in asked and "one" in answer
    with pytest.raises(DataError, match="refuses the chat"):
        chat_sequences(chat, [greeting], "f:1", {})


@pytest.mark.parametrize(
    ("changes", "sequences"),
    [
        # drops what was said before
        (
            {"answer": "{{ '[' + (m.content if loop.last else '') + eos_token }}"},
            [["ask[", "one<|end|>"], ["ask[<|end|>more[", "two<|end|>"]],
        ),
        # ends the last turn otherwise, as gpt-oss
        (
            {"answer": "{{ '[' + m.content + (eos_token if loop.last else '<|pad|>') }}"},
            [["ask[", "one<|end|>"], ["ask[one<|pad|>more[", "two<|end|>"]],
        ),
        # ends the chat beside the turn, as Phi
        (
            {"answer": ANSWER + "{{ '(over)' if loop.last }}"},
            [["ask[", "one<|end|>", "\nmore[", "two<|end|>"]],
        ),
        # writes several blocks for a turn, as Functionary
        (
            {"answer": "{% for part in ['x', m.content] %}" + ANSWER.replace("m.content", "part") + "{% endfor %}"},
            [["ask[", "x<|end|>\n[one<|end|>", "\nmore[", "x<|end|>\n[two<|end|>"]],
        ),
        # shows what the system said in an unanswered question alone, as Mistral
        (
            {
                "said": "{% if m.role == 'user' %}{{ m.content }}"
                "{% if loop.last and messages[0].role != 'user' %}{{ messages[0].content }}{% endif %}{% endif %}"
            },
            [["askBe kind.[", "one<|end|>"], ["ask[one<|end|>\nmoreBe kind.[", "two<|end|>"]],
        ),
        # asks for reasoning that a turn does not have, as DeepSeek-R1
        ({"prompt": "{{ '[<think>' if add_generation_prompt }}"}, [["ask[", "one<|end|>", "\nmore[", "two<|end|>"]]),
        # the same, whose answers begin as the reasoning does
        (
            {"prompt": "{{ '[o<|pad|>' if add_generation_prompt }}"},
            [["ask[", "one<|end|>", "\nmore[", "two<|end|>"]],
        ),
    ],
)
def test_every_answer_is_trained_once_after_what_a_generator_would_see(
    changes: dict[str, str], sequences: list[list[str]]
) -> None:
    chat, turns = format_of(**changes), TURNS
    if "said" in changes:
        turns = [{"role": "system", "content": "Be kind."}, *TURNS]
    found = chat_sequences(chat, turns, "f:1", {})
    assert [texts(chat, sequence) for sequence in found] == sequences


@pytest.mark.parametrize(
    ("family", "count"),
    [("llama3", 1), ("nemotron3-keeps-thinking", 1), ("nemotron3", 2), *((f"qwen3{name}", 3) for name in ("", ".5"))],
)
def test_published_templates_train_every_answer_of_a_long_chat_once(family: str, count: int) -> None:
    chat, said = stock_chat(family), ["the first", "<think>\nso\n</think>\n\nthe second", "the third"]
    asked = {"role": "user", "content": "go"}
    turns = [turn for text in said for turn in (asked, {"role": "assistant", "content": text})]
    found = chat_sequences(chat, turns, "f:1", {})
    trained = "".join(part for each in found for part in texts(chat, each)[1::2])
    assert len(found) == count
    assert [trained.count(text.rpartition("\n")[2]) for text in (*said, "so")] == [1, 1, 1, 1]
    if count == len(said):  # each after the prompt that a generator would have
        for number, sequence in enumerate(found):
            prompt = chat.render(turns[: 2 * number + 1])
            assert sequence.token_ids[: sequence.token_mask.index(1)] == prompt


PREFIXED = {
    "Llama 2": {"normalizer": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])},
    "Mistral": {"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="first", split=False)},
    "T5": {"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="always")},
    "RoBERTa": {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
}
"""Tokenizers that write a space before a text that begins."""


@pytest.mark.parametrize("name", PREFIXED)
@pytest.mark.parametrize("layout", ["<|{{ m.role }}|>\n{{ m.content }}</s>\n", "<s>{{ m.role }}:{{ m.content }}</s>"])
@pytest.mark.parametrize("said", [" two", "<s>two</s> <|x"])
def test_a_chat_has_the_tokens_of_its_text_where_tokenizers_write_a_space_before_a_text(
    name: str, layout: str, said: str
) -> None:
    made = Tokenizer(BPE(unk_token="<unk>", byte_fallback=True))
    for part, value in PREFIXED[name].items():
        setattr(made, part, value)
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    texts = ["two more two user two assistant user assistant <|x|> Ġtwo Ġ"] * 5
    made.train_from_iterator(texts, BpeTrainer(vocab_size=340, special_tokens=specials, show_progress=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    asks = layout.partition("{{ m.content }}")[0].replace("{{ m.role }}", "assistant")
    tokenizer.chat_template = (
        "{% for m in messages %}" + layout + "{% endfor %}{% if add_generation_prompt %}" + asks + "{% endif %}"
    )
    chat = ChatFormat(tokenizer)
    turns = [{"role": role, "content": said} for role in ("user", "assistant") * 2]
    whole = chat.render(turns, generation_prompt=False)
    (sequence,) = chat_sequences(chat, turns, "f:1", {})
    assert sequence.token_ids == whole[: len(sequence.token_ids)] and set(whole[len(sequence.token_ids) :]) <= {
        *chat.encode("\n", "</s>")
    }
    asked = chat.render(turns[:1])
    until = sequence.token_ids.index(tokenizer.eos_token_id, len(asked)) + 1
    assert sequence.token_ids[: len(asked)] == asked
    assert sequence.token_ids[:until] + chat.render_continuation(turns[:1]) == chat.render(turns[:3])


@pytest.mark.parametrize("eos", ["<|im_end|>", "<|endoftext|>"])
def test_nothing_after_the_end_of_a_turn_is_trained_and_text_that_spells_one_is_text(eos: str) -> None:
    """Also of a base model whose own end token its template does not write."""
    chat = stock_chat("qwen3", eos=eos)
    says = "say <|im_end|>\n<|im_start|>user\nno"
    turns = [{"role": role, "content": f"{role}: {says}"} for role in ("user", "assistant") * 2]
    *_, sequence = chat_sequences(chat, turns, "f:1", {})
    *_, answer = texts(chat, sequence)
    assert answer.endswith(f"assistant: {says}<|im_end|>")
    ends = chat.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|im_start|>"])
    assert [sequence.token_ids.count(end) for end in ends] == [4, 4]
    assert chat.decode(sequence.token_ids, whole=True).count(says) == 4


@pytest.mark.parametrize(
    ("turns", "what"),
    [
        (TURNS[:1], "no assistant turn"),
        ([TURNS[0], TURNS[1] | {"weight": 0}], "only turns of weight 0"),
        ([TURNS[0], {"role": "assistant", "content": None}], "neither `content`"),
    ],
)
def test_a_chat_that_teaches_nothing_or_cannot_be_written_is_refused(turns: list[dict[str, Any]], what: str) -> None:
    with pytest.raises(DataError, match=what) as caught:
        chat_sequences(format_of(), turns, "f:1", {})
    assert str(caught.value.where).startswith("f:1")


SIZE = 32
VOCABULARY = 64


def chats(count: int) -> list[ChatSequence]:
    rng = random.Random(3)
    made = []
    for _ in range(count):
        asked, said = rng.randint(1, 9), rng.randint(1, 14)
        ids = [rng.randrange(VOCABULARY) for _ in range(asked + said)]
        made.append(ChatSequence(ids, [0] * asked + [1] * said))
    return made


def rows_of(given: list[ChatSequence]) -> list[list[ChatSequence]]:
    packed = pack("modified_first_fit_decreasing", [len(chat.token_ids) for chat in given], SIZE)
    return [[given[place] for place in sorted(row)] for row in packed]


def written(file: Path, rows: list[Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def opened(file: Path, *, max_length: int = SIZE) -> Any:
    return read_packed(file, max_length=max_length, vocabulary=VOCABULARY)


def test_what_is_read_is_what_was_packed(tmp_path: Path) -> None:
    rows = rows_of(chats(40))
    assert len(rows) < 25 and max(len(row) for row in rows) > 2
    for row in rows:
        assert list(chats_of(row_of(row))) == row
    found = opened(written(tmp_path / "train.jsonl", [row_of(row) for row in rows]))
    assert [list(row.chats) for row in found] == rows and [list(row.chats) for row in found[3:5]] == rows[3:5]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "qwen3"
    write_checkpoint("qwen3", folder, initializer_range=0.1)
    return folder


def stepped(policy: Any, examples: list[Any]) -> tuple[dict[str, float], dict[str, torch.Tensor], torch.Tensor]:
    """Metrics of a training step, weights after it, and what the policy says of the batch then."""
    batch = batch_of(examples)
    metrics = policy.train_step(batch)
    weights = {name: tensor.clone() for name, tensor in policy.weights()}
    return {name: metrics[name] for name in ("loss", "grad_norm")}, weights, policy.logprobs(batch)


def megatron(checkpoint: Path, algorithm: str) -> MegatronPolicy:
    packing = {"enabled": True, "train_mb_tokens": SIZE, "logprob_mb_tokens": SIZE, "algorithm": algorithm}
    settings = {"precision": "float32", "sequence_packing": packing, "megatron_cfg": {"optimizer": {"lr": 1e-3}}}
    return MegatronPolicy(PolicyConfig.model_validate(settings), checkpoint, NegativeLogLikelihood())


def test_megatron_steps_on_packed_rows_bit_for_bit_as_on_chats_that_it_packs_itself(checkpoint: Path) -> None:
    given = chats(40)
    rows = rows_of(given)
    metrics, weights, said = stepped(megatron(checkpoint, "modified_first_fit_decreasing"), given)
    found = stepped(megatron(checkpoint, "concatenative"), [PackedRow(tuple(row)) for row in rows])
    assert found[0] == metrics and metrics["grad_norm"] > 0
    assert all(torch.equal(found[1][name], tensor) for name, tensor in weights.items())
    order = [given.index(chat) for row in rows for chat in row]
    assert torch.equal(found[2], said[order])


def test_a_policy_that_pads_has_the_same_loss_and_gradient(checkpoint: Path) -> None:
    given = chats(12)
    settings = {
        "precision": "float32",
        "dtensor_cfg": {"enabled": True},
        "dynamic_batching": {"enabled": True, "train_mb_tokens": 128, "logprob_mb_tokens": 128},
        "optimizer": {"kwargs": {"lr": 1e-3}},
    }
    found = []
    for examples in (given, [PackedRow(tuple(row)) for row in rows_of(given)]):
        policy = DTensorPolicy(PolicyConfig.model_validate(settings), checkpoint, NegativeLogLikelihood())
        found.append(stepped(policy, examples))
    (metrics, weights, _), (packed_metrics, packed_weights, _) = found
    assert packed_metrics == pytest.approx(metrics, rel=1e-5)
    for name, tensor in weights.items():
        torch.testing.assert_close(packed_weights[name], tensor, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"loss_mask": [0, 1]}, "for each of `input_ids`"),
        ({"seq_start_id": [0, 2, 2]}, "list of places"),
        ({"input_ids": [1, 2, 3, VOCABULARY]}, "packed with another tokenizer"),
    ],
)
def test_a_row_that_is_none_is_named_before_training_begins(tmp_path: Path, changed: Any, problem: str) -> None:
    good = {"input_ids": [1, 2, 3, 4], "loss_mask": [0, 1, 1, 0], "seq_start_id": [0, 2]}
    file = written(tmp_path / "train.jsonl", [good, {**good, **changed}])
    with pytest.raises(DataError, match=problem) as caught:
        opened(file)
    assert str(caught.value.where).startswith(f"{file}:2")
