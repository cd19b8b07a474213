"""Fused operators of the policy, on GPUs (Triton) and on CPU (C), beside plain torch."""
