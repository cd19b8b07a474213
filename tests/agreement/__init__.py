"""Our verifiers beside NeMo-Gym's, on the same answers, in one program: `python -m tests.agreement --help`."""
