"""Whether a parallel layout divides the model, the batch and the devices, and what memory it takes.

Arithmetic over plain numbers, without torch and without pydantic: the same functions refuse a layout when a run is
planned (resolver), before its first step starts (steps), and when its ranks are placed and built (engine).
"""
