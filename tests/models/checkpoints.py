"""Tiny random checkpoints with a real tokenizer and chat template."""

from pathlib import Path

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "vocab_size": 200,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
SHAPES = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_rope_scaling": ("llama", {"rope_parameters": LLAMA3}),
    "llama_mha": ("llama", {"num_key_value_heads": 4}),
    "qwen2": ("qwen2", {"head_dim": None}),
    "qwen2_tied": ("qwen2", {"head_dim": None, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3_tied": ("qwen3", {"tie_word_embeddings": True, "head_dim": 32}),
    "qwen3_yarn": ("qwen3", {"rope_parameters": YARN}),
    "qwen3_moe": (
        "qwen3_moe",
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
    "qwen3_linear": (
        "qwen3",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}, "num_key_value_heads": 1},
    ),
}
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"


def hf_model(name: str, seed: int = 0, **changes):
    """A random transformers model, biases and norms included, so that nothing is equal by being zero or one."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, own = SHAPES[name]
    settings = {**SIZES, **own, **changes}
    config = AutoConfig.for_model(
        model_type, bos_token_id=1, eos_token_id=2, **{k: v for k, v in settings.items() if v is not None}
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("gate.weight"):
                torch.nn.init.normal_(parameter, std=0.2)
            if parameter_name.endswith("bias") or "norm" in parameter_name:
                torch.nn.init.normal_(parameter, mean=float("norm" in parameter_name), std=0.3)
    return model


def write_tokenizer(folder: Path, vocab_size: int = 200) -> None:
    """A byte-level tokenizer of single characters with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: vocab_size - 3]
    vocabulary = {token: number for number, token in enumerate(["<unk>", "<s>", "</s>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def write_checkpoint(name: str, folder: Path, seed: int = 0, **changes) -> None:
    """A Hugging Face checkpoint folder."""
    model = hf_model(name, seed, **changes)
    model.save_pretrained(folder)
    write_tokenizer(folder, model.config.vocab_size)
