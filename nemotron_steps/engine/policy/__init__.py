"""The trained model: `megatron` (on megatron-core's linears) and `dtensor` (any Hugging Face causal LM under FSDP2)."""
