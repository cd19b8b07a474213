"""Kernels in C for float32 on CPU, compiled at first use where the machine has a C compiler.

What Triton's kernels are on GPUs. Without a compiler everything runs on torch's operators, with equal results up to
rounding; whoever calls a kernel asks `library()` first.
"""
