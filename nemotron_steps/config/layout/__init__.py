"""Whether a parallel layout divides the model, the batch and the devices, and what memory it takes.

Arithmetic over plain numbers, without torch and without pydantic: the same functions refuse a layout when a run is
planned (resolver), before its first step starts (steps), and when its ranks are placed and built (engine).

    model_spec.py       what of a model a layout depends on
    parallel_config.py  what of a config it depends on, and how many ranks and generators that makes
    constraints.py      everything about the two that does not divide, each with a hint
    model_limits.py     what models that the step does not train cannot do: lengths, tokens, templates, cuts
    memory/             the memory that a step's parts take
"""
