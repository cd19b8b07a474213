"""Where the parts of a run live: in this process, or in Ray actors (policy ranks, generators, environments, judges).

    parts.py              what a run needs, and what either way of placing it gives
    in_process.py         a whole GRPO run in this process
    cluster.py            connect to Ray or start it; reserve devices
    policy_group.py       Policy over ranks in actors          policy_worker.py       one rank
    generator_group.py    Generator over actors                generation_worker.py   one generator, always stepping
    prefix_memory.py      which generator has a conversation's KV cache
    judge_actor.py        a judge in an actor                  environment_actor.py   the environments in an actor
    on_ray.py             a whole GRPO run, placed               policy_alone.py        a policy without generators

The classes inside the actors are those of the one-process run. Actors are made by engine/workers; weights travel in
engine/weight_sync.
"""
