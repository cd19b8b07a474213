"""Pure functions of logprobs and advantages: losses, KL, importance ratios, their reduction and metrics."""
