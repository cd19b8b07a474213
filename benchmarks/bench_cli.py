"""How long the command line takes to answer, beside `python -c pass`.

    python -m benchmarks.bench_cli [REPEATS]

Each command is started REPEATS times (default 15), interleaved with the others so that a busy moment of the machine
hits all of them alike. Wall time is what a user waits; processor time is what the command costs on a quiet machine.
Python may write bytecode, as it does on a user's machine. The last line is JSON.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LIMITS_MS = {
    "steps --help": 150,
    "steps list": 150,
    "steps show": 150,
    "steps run --dry-run": 700,
    "the largest --dry-run": 1000,
}

COMMANDS: dict[str, list[str]] = {
    "python -c pass": ["-c", "pass"],
    "steps --help": ["-m", "nemotron_steps.cli.main", "--help"],
    "steps list": ["-m", "nemotron_steps.cli.main", "list"],
    "steps list --json": ["-m", "nemotron_steps.cli.main", "list", "--json"],
    "steps show": ["-m", "nemotron_steps.cli.main", "show", "rl/nemo_rl/rlhf"],
    "steps types": ["-m", "nemotron_steps.cli.main", "types"],
    "steps plan": ["-m", "nemotron_steps.cli.main", "plan", "rl/nemo_rl/rlhf", "-c", "tiny"],
    "steps run --dry-run": ["-m", "nemotron_steps.cli.main", "run", "rl/nemo_rl/rlhf", "-c", "tiny", "--dry-run"],
    "the largest --dry-run": ["-m", "nemotron_steps.cli.main", "run", "super3_rl", "--dry-run"],
}


def measure(command: list[str], environment: dict[str, str], folder: Path) -> tuple[float, float]:
    """(wall, processor) milliseconds of one start. RuntimeError if the command fails."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    result = subprocess.run([sys.executable, *command], env=environment, cwd=folder, capture_output=True, check=False)
    wall = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed: {result.stderr.decode()[-800:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall * 1000, cpu * 1000


def main() -> None:
    """Measure, print a table and the JSON line."""
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    root = Path(__file__).resolve().parent.parent
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        environment |= {
            "PYTHONPYCACHEPREFIX": str(folder / "bytecode"),
            "PYTHONPATH": str(root),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "STEPS_HOME": str(folder / "home"),
        }
        for count in range(repeats + 2):
            for name, command in COMMANDS.items():
                spent = measure(command, environment, folder)
                if count >= 2:  # the first starts write bytecode and the caches
                    times[name].append(spent)
    figures = {
        name: {
            "wall_ms": round(statistics.median(wall for wall, _ in spent), 1),
            "cpu_ms": round(statistics.median(cpu for _, cpu in spent), 1),
            "worst_wall_ms": round(max(wall for wall, _ in spent), 1),
        }
        for name, spent in times.items()
    }
    print(f"{'':40}{'median':>10}{'processor':>12}{'worst':>10}{'limit':>8}")
    for name, figure in figures.items():
        limit = LIMITS_MS.get(name, "")
        numbers = f"{figure['wall_ms']:>7.0f} ms{figure['cpu_ms']:>9.0f} ms{figure['worst_wall_ms']:>7.0f} ms"
        print(f"{name:40}{numbers}{limit:>8}")
    floor = figures["python -c pass"]["wall_ms"]
    ratios = {name: round(figure["wall_ms"] / floor, 2) for name, figure in figures.items()}
    met = all(figures[name]["wall_ms"] <= limit for name, limit in LIMITS_MS.items())
    print(json.dumps({"benchmark": "cli", "repeats": repeats, "figures": figures, "to_python": ratios, "met": met}))


if __name__ == "__main__":
    main()
