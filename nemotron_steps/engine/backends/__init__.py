"""One part of a run from its config, in this process. The only place that chooses between backends.

    policy.py       Megatron or dtensor          judges.py    a server, or a generator of this process
    generator.py    embedded or vLLM

Where a part lives is engine/placement's business; what a run is made of, engine/build's.
"""
