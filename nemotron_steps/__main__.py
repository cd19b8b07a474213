"""`python -m nemotron_steps` is `steps`, from a checkout that is not installed too."""

import sys

from nemotron_steps.cli.main import steps

if __name__ == "__main__":
    sys.exit(steps())
