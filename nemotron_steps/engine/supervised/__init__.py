"""Training without rollouts: SFT and DPO."""
