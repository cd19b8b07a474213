"""Whether a policy's parallel layout comes out even over its model, its batch and its devices.

Arithmetic over plain numbers, without torch and without pydantic: the same functions refuse a layout when a run is
planned (resolver), before its first step starts (steps), and when its ranks are placed and built (engine).

    facts.py     what of a model a layout depends on
    sizes.py     what of a config it depends on, and how many ranks and generators that makes
    misfits.py   everything about the two that does not come out even
    suggestions.py  what to paste where it does not
"""
