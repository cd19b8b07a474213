"""Nano3's GRPO training, as in the public recipe: python train.py --config config/grpo_nanov3.yaml [key=value ...]

It takes what `nemotron nano3 rl` takes: --input policy=PATH, --dry-run, --run PROFILE, overrides.
"""

import sys
from pathlib import Path

from nemotron_steps.cli.main import nemotron

if __name__ == "__main__":
    status = nemotron(["nano3", "rl", *sys.argv[1:]])
    if status and not Path("output/nano3/stage2_rl").exists():
        print("train.py: output/nano3/stage2_rl is made by: python data_prep.py", file=sys.stderr)
    sys.exit(status)
