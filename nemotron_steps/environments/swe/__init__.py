"""Software engineering by an agent: the harness, the working copy, the grading."""
