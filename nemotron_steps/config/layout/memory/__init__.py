"""The memory that a step's parts take on one device, predicted from its config and its model's shape.

Arithmetic over plain numbers, without torch. Bytes everywhere; docs/memory.md has the formulas and what was measured.

    settings.py     what of a config memory depends on, and the tokens of its micro-batches
    shape.py        the shape of a model, and how many parameters a rank holds of it
    activations.py  what a layer keeps for its backward pass
    policy.py       weights, gradients, optimizer, activations and logprobs of the trained model; teachers beside it
    generation.py   weights and caches of a generator or a judge
    devices.py      which of it is on one device at the same time, and what to paste where it does not fit
"""
