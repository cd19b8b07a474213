"""The policy's attention: packed rows that may share a prompt, by torch's or Transformer Engine's kernels."""
