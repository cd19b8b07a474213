"""The parts of a run, each from its validated config, in this process.

    rows.py             prompts: read, checked once against their environments
    prompt_lengths.py   prompts and questions that leave no room for an answer
    backends.py         policy, generator, teachers, judges: the only place that chooses between backends
    collector.py        what samples and grades, with the policy served to agents

Where a part lives, and what a whole run is made of, is engine/placement's business.
"""
