"""A tiny Qwen3 that has learned three chats by heart: enough to call a tool, read its result and answer."""

from pathlib import Path

import torch

from benchmarks.grpo_task import make_checkpoint
from nemotron_steps.engine.generation.embedded.generator import EmbeddedGenerator
from nemotron_steps.models.architecture import Architecture
from nemotron_steps.models.chat import ChatFormat
from nemotron_steps.models.huggingface import load_hf_weights

TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{% for t in tools %}{{ t.function.name }} {% endfor %}<|im_end|>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    '{% for c in m.tool_calls %}<tool_call>{"name": "{{ c.function.name }}", '
    '"arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL = {"type": "function", "name": "add", "parameters": {"properties": {"by": {"type": "integer"}}}}
QUESTION = {"role": "user", "content": "add two"}
CALL = '<think>two</think><tool_call>{"name": "add", "arguments": {"by": 2}}</tool_call>'
RESULT = {"role": "tool", "content": "now 2"}
ANSWER = "It is 2."
GREETING = {"role": "user", "content": "hello"}
REPLY = "<think>be kind</think>Hi."
MAX_LENGTH = 256


def make_taught_checkpoint(folder: Path, steps: int = 80) -> float:
    """Write the checkpoint; returns the last training loss."""
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    make_checkpoint(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    chat = ChatFormat(tokenizer)
    first = chat.render([QUESTION], [TOOL])
    called = [*tokenizer.encode(CALL, add_special_tokens=False), chat.tokenizer.eos_token_id]
    second = first + called + chat.render_continuation([RESULT], [TOOL])
    examples = [
        (second, [*tokenizer.encode(ANSWER, add_special_tokens=False), chat.tokenizer.eos_token_id]),
        (first, called),
        (chat.render([GREETING]), [*tokenizer.encode(REPLY, add_special_tokens=False), chat.tokenizer.eos_token_id]),
    ]
    longest = max(len(prompt) + len(answer) for prompt, answer in examples)
    ids = torch.zeros(len(examples), longest, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for row, (prompt, answer) in enumerate(examples):
        ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(steps):
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    return float(loss.detach())


def embedded(folder: Path, chat: ChatFormat) -> EmbeddedGenerator:
    return EmbeddedGenerator(
        Architecture.from_folder(folder),
        load_hf_weights(folder).items(),
        max_sequences=16,
        max_total_length=MAX_LENGTH,
        eos_token_ids=(chat.tokenizer.eos_token_id,),
        decode=chat.decode,
    )
