"""The trained model: `megatron`, and `dtensor` for any Hugging Face causal LM."""
