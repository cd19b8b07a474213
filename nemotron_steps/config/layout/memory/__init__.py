"""The memory that a step's parts take on one device, predicted from its config and its model's shape.

Arithmetic over plain numbers, without torch. Bytes everywhere; docs/memory.md has the formulas and what was measured.

    shape.py        the shape of a model, and how many parameters a rank holds of it
    batch.py        from prompts to the tokens of a micro-batch
    settings.py     what else of a config memory depends on
    adapters.py     the same of low-rank adapters
    activations.py  what a layer keeps for its backward pass
    policy.py       weights, gradients, optimizer, activations and logprobs of the trained model
    teachers.py     teachers of distillation, beside the policy or apart
    generation.py   weights and caches of a generator or a judge
    devices.py      which of it is on one device at the same time
    suggestions.py  what to paste where it does not fit
"""
