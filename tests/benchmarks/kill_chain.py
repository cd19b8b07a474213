"""Kill -9 the tiny chain at random moments, go on with the same command, compare with an unbroken run.

    python -m tests.benchmarks.kill_chain [--kills 20] [--reference HOME]     the last line is JSON

Each start in a home goes on from what was committed there. When the chain is whole, every artifact is compared with
that of an unbroken run by its tree digest; if kills are left, the next chain starts in an empty home.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COMMAND = [sys.executable, "-m", "nemotron_steps.cli.main", "run", "rl/nemo_rl/rlhf", "-c", "tiny", "--home"]


def digests(home: Path) -> dict[str, str]:
    """Name and version of every committed artifact → digest of its content."""
    listing = subprocess.run(
        [sys.executable, "-m", "nemotron_steps.cli.main", "artifacts", "list", "--json", "--home", str(home)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return {f"{row['name']}:v{row['version']}": row["digest"] for row in json.loads(listing.stdout)}


def kill_until_done(home: Path, most: int, rng: random.Random) -> int:
    """Run the chain in `home` to its end, killing it at most `most` times. Returns how often it was killed."""
    kills = 0
    while kills < most:
        process = subprocess.Popen(
            [*COMMAND, str(home)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            if process.wait(timeout=rng.uniform(2, 30)):
                raise SystemExit(f"the chain failed by itself after {kills} kills; its runs are in {home}")
            return kills
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            kills += 1
            count = len(digests(home)) if (home / "artifacts").is_dir() else 0
            print(f"kill {kills}: {count} artifacts committed", flush=True)
    subprocess.run([*COMMAND, str(home)], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return kills


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reference", type=Path, help="home of an unbroken run; made when missing")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as scratch:
        reference = arguments.reference or Path(scratch, "unbroken")
        started = time.perf_counter()
        subprocess.run([*COMMAND, str(reference)], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        unbroken = time.perf_counter() - started
        expected = digests(reference)
        same: dict[str, bool] = {}
        kills, chains, started = 0, 0, time.perf_counter()
        while kills < arguments.kills:
            chains += 1
            home = Path(scratch, f"killed-{chains}")
            kills += kill_until_done(home, arguments.kills - kills, rng)
            found = digests(home)
            same |= {f"chain {chains}: {name}": found.get(name) == digest for name, digest in expected.items()}
        broken = time.perf_counter() - started
    for name, equal in same.items():
        print(f"{'same' if equal else 'DIFFERENT':10} {name}")
    print(
        json.dumps(
            {
                "kills": kills,
                "chains": chains,
                "unbroken_s": unbroken,
                "killed_s": broken,
                "identical": sum(same.values()),
                "artifacts": len(same),
            }
        )
    )


if __name__ == "__main__":
    main()
