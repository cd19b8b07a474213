"""The policy's attention: packed rows that may share a prompt, by our own kernels or torch's."""
