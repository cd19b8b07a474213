"""The package in Python: `from nemotron_steps import GRPO, Registry, plan, run`.

The same requests as on the command line, through the same planner and runner. Errors are raised as they are (see
`nemotron_steps.errors`); nothing here ends the process or keeps state of its own.
"""
