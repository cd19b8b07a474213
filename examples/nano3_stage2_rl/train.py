"""Nano3's GRPO training, as in the public recipe: python train.py --config config/grpo_nanov3.yaml [key=value ...]

It takes what `nemotron nano3 rl` takes: --input policy=PATH, --dry-run, --run PROFILE, overrides.
"""

import sys

from nemotron_steps.cli.main import nemotron

if __name__ == "__main__":
    sys.exit(nemotron(["nano3", "rl", *sys.argv[1:]]))
