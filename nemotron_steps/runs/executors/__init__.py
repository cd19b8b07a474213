"""Where a run is worked on: this machine, a container, Slurm, Lepton, Ray, or what another package brings.

An executor starts `steps run ... --resume RUN` somewhere that sees the home, and answers for the job it started. The
run itself is written by the process on the other side, into the run folder; executors never touch it.

Third parties add one under the entry-point group `nemotron_steps.executors`: the name is what `executor = ` in a
profile says, the object a class without arguments that is an Executor (see `base`). Its `profile_model`, a subclass
of `config.profiles.Profile` with the executor's own keys, is what profiles that name it are checked against; without
one any key is accepted and handed on.
"""
