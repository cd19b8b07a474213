"""From a validated config to the live parts of a run.

    rows.py       prompts: read, checked once against their environments    run.py       a GRPO run
    prompt_lengths.py   prompts that leave no room for an answer            policy.py    a policy that trains alone
    collector.py  what samples and grades, with the policy served to agents

Each part is made in engine/backends; where it lives is chosen here and done by engine/placement.
"""
