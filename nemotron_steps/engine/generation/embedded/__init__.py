"""The generator in torch: KV cache, continuous batching, prompts computed once a group. Runs anywhere."""
