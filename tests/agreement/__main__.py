"""Grade the same answers with our verifiers and with NeMo-Gym's, and write how often they agree into the docs.

    python -m tests.agreement --gym PATH_TO_NEMO_GYM_CHECKOUT [VERIFIER...] [--write docs/environments.md]

Outside `make test`: it needs a checkout of github.com/NVIDIA-NeMo/Gym and the packages that its graders import. Each
verifier is a module of tests/agreement/verifiers. Two rewards agree if they are within 1e-6 of each other; what ours
could not judge (masked), and an exception of theirs, agrees with nothing.
"""

import argparse
import asyncio
import logging
import sys
from pathlib import Path

from tests.agreement.compare import compare, line_of, names
from tests.agreement.gym import Gym
from tests.agreement.table import write_table


def main(arguments: list[str]) -> int:
    """Compare, print, and write the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.agreement", description=__doc__.partition("\n")[0])
    parser.add_argument("verifiers", nargs="*", metavar="VERIFIER", help=f"of {', '.join(names())} (default: all)")
    parser.add_argument("--gym", type=Path, required=True, help="a checkout of github.com/NVIDIA-NeMo/Gym")
    parser.add_argument("--answers", type=int, default=1000, help="answers per verifier")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--examples", type=int, default=1, help="shown for each pair of verdicts of a rule")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the lines into this page's table")
    given = parser.parse_args(arguments)
    unknown = set(given.verifiers) - set(names())
    if unknown:
        parser.error(f"no verifier {', '.join(sorted(unknown))}; there are {', '.join(names())}")
    logging.disable(logging.CRITICAL)
    gym = Gym(given.gym)
    lines = []
    for name in given.verifiers or names():
        answers = asyncio.run(compare(gym, name, given.answers, given.seed))
        lines.append(line_of(name, answers, given.examples))
    if given.write:
        write_table(given.write, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
