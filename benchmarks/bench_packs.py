"""How much longer `steps list` takes with 200 installed packs: `python -m benchmarks.bench_packs [--packs N]`.

The command is started again and again, by turns with and without the packs, so that what else the machine does falls on
both alike. Time is that of the processor, user and system, of the whole process; the least of all starts and their
median are printed. The first start with new packs, which reads every manifest, is told apart.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from nemotron_steps.manifest.packs import builtin_pack_root

MANIFEST = """\
[step]
id = "pack{n}/step"
name = "A step"
category = "data_prep"
description = "One of many."
entry = "pack{n}.code:run"

[[consumes]]
name = "rows"
type = "training_jsonl"

[[produces]]
name = "short"
type = "training_jsonl"

[[parameters]]
name = "count"
description = "rows to keep"
"""


def install(site: Path, packs: int) -> None:
    """Write `packs` distributions of one step each, as an installer leaves them."""
    for n in range(packs):
        manifests = site / f"pack{n}" / "pack" / "manifests"
        manifests.mkdir(parents=True)
        (site / f"pack{n}" / "__init__.py").write_text("")
        (manifests / "step.toml").write_text(MANIFEST.format(n=n))
        info = site / f"pack{n}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: pack{n}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[nemotron_steps.packs]\npack{n} = pack{n}:pack\n")


def processor_seconds(words: list[str], path: list[Path], cache: Path) -> float:
    """User and system time of one start."""
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join(str(entry) for entry in (*path, builtin_pack_root())),
        "XDG_CACHE_HOME": str(cache),
    }
    command = [sys.executable, "-m", "nemotron_steps.cli.main", *words]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, check=True, capture_output=True, timeout=120, env=environment, cwd=cache, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert ("pack7/step" in done.stdout) == bool(path), done.stdout[:300]
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(packs: int, rounds: int) -> dict[str, float]:
    """Milliseconds of `steps list`: the least and the median of each, and the first start with the packs."""
    with tempfile.TemporaryDirectory() as folder:
        site, cache, other = Path(folder, "site"), Path(folder, "cache"), Path(folder, "other")
        for each in (site, cache, other):
            each.mkdir()
        install(site, packs)
        words = ["list"]
        processor_seconds(words, [], other)
        first = processor_seconds(words, [site], cache)
        without, with_packs = [], []
        for _ in range(rounds):
            without.append(processor_seconds(words, [], other))
            with_packs.append(processor_seconds(words, [site], cache))
    return {
        "without, least": 1e3 * min(without),
        "without, median": 1e3 * statistics.median(without),
        "with, least": 1e3 * min(with_packs),
        "with, median": 1e3 * statistics.median(with_packs),
        "first": 1e3 * first,
    }


def main() -> None:
    """Measure and print a row of the table in docs/benchmarks.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packs", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    found = measure(arguments.packs, arguments.rounds)
    print(
        f"| `steps list`, {arguments.packs} packs more | " + " | ".join(f"{ms:.0f} ms" for ms in found.values()) + " |"
    )
    print(f"added: {found['with, least'] - found['without, least']:.1f} ms at least", end="")
    print(f", {found['with, median'] - found['without, median']:.1f} ms in the median")


if __name__ == "__main__":
    main()
