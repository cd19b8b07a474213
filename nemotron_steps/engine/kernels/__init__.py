"""Kernels: in Triton for GPUs, in C for float32 on CPU; without a compiler torch's operators, equal up to rounding."""
