"""Kernels: in Triton for GPUs, in C for float32 on CPU."""
