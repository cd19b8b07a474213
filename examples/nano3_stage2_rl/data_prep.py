"""Nano3's prompts, as in the public recipe: python data_prep.py --config config/data_prep.yaml [key=value ...]

They are an artifact of the home; output/nano3/stage2_rl is a link to it.
"""

import argparse
import shlex
import sys
from pathlib import Path

from nemotron_steps import StepsError, run

HERE = Path(__file__).parent
TREE = Path("output/nano3/stage2_rl")

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--config", default=HERE / "config" / "data_prep.yaml", metavar="FILE")
parser.add_argument("overrides", nargs="*", metavar="key=value", help="mirror=FOLDER, sample=N, input_path=FILE, ...")
arguments, unknown = parser.parse_known_args()
if unknown:
    command = shlex.join(["nemotron", "nano3", "data", "prep", "rl", *sys.argv[1:]])
    parser.error(f"no flag {unknown[0]} here; the command has more: {command}")
if TREE.exists() and not TREE.is_symlink():
    parser.error(f"{TREE} is in the way of the link to the prompts: mv {TREE} {TREE}.before")

try:
    result = run("data_prep/rl_prep", config=str(arguments.config), overrides=arguments.overrides)
except StepsError as error:
    print(error.render(), file=sys.stderr)
    sys.exit(error.exit_code)

TREE.parent.mkdir(parents=True, exist_ok=True)
if TREE.is_symlink():
    TREE.unlink()
TREE.symlink_to(result.outputs["prompts"].path, target_is_directory=True)
print(f"{TREE} -> {TREE.readlink()}")
