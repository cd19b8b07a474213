"""A run's parts where the config wants them: in this process, or in Ray actors.

    run.py              a GRPO run from its config: every part placed, and what the loop needs around them
    parts.py            what a run needs, and all of it in this process
    on_ray.py           all of it in Ray actors
    standalone.py       a policy without a generator (SFT, DPO), a generator without a policy (pass rates)
    cluster.py          connect to Ray or start it; reserve devices
    policy_group.py     Policy over ranks in actors          policy_worker.py       one rank
    teacher_group.py    teachers on devices of their own
    generator_group.py  Generator over actors                generation_worker.py   one generator, always stepping
    environment_actor.py   the environments in an actor, and judges in actors

The classes inside the actors are those of the one-process run. Actors are made by engine/workers; weights travel in
engine/weight_sync.
"""
