"""Where a run is worked on. An executor starts `steps run ... --resume RUN` somewhere that sees the home, and answers
for the job; it never touches the run folder. How to add one: docs/executors.md."""
