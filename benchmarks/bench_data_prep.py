"""rl_prep over rows of a blend, beside `datasets` (load, map with the same check, to_json): rows a second and memory.

    python -m benchmarks.bench_data_prep [--small] [ROWS ...]

Both check that a row's environment could score it, with two processes each. Peak memory is of the largest process, peak
disk of all that the step has written at a time. --small: rl_prep alone, over rows of about 200 bytes.
`datasets` is needed beside the development packages. The last line is JSON.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SIZES = (20_000, 100_000, 400_000)


def write_rows(path: Path, count: int, *, small: bool = False) -> int:
    """Math rows of about 1.3 kB, as a blend has them, or small ones. Returns bytes."""
    if small:
        with path.open("w") as file:
            for n in range(count):
                file.write(
                    f'{{"responses_create_params": {{"input": [{{"role": "user", "content": "{n} + 1?"}}]}}, '
                    f'"question": "{n} + 1?", "expected_answer": "{n + 1}", '
                    '"agent_ref": {"name": "math_with_judge_simple_agent"}}\n'
                )
        return path.stat().st_size
    text = "Let a, b and c be positive integers with a + b + c = {n}. " * 8
    with path.open("w") as file:
        for n in range(count):
            question = text.format(n=n)
            row = {
                "responses_create_params": {"input": [{"role": "user", "content": question}]},
                "question": question,
                "expected_answer": str(n),
                "agent_ref": {"type": "responses_api_agents", "name": "math_with_judge_simple_agent"},
                "pass_rate": 0.5,
                "reward_profiles": [0.0, 1.0, n / 7],
            }
            file.write(json.dumps(row) + "\n")
    return path.stat().st_size


def ours(source: Path, folder: Path) -> None:
    """data_prep/rl_prep."""
    from nemotron_steps.config.schema.data_prep import RlPrepConfig
    from nemotron_steps.runs.context import plain_context
    from nemotron_steps.steps.data_prep import rl_prep

    config = RlPrepConfig(input_path=str(source), num_workers=2)
    rl_prep.run(plain_context(config, folder, outputs={"prompts": "rl_prompts"}))


def theirs(source: Path, folder: Path) -> None:
    """`datasets`."""
    import datasets

    rows = datasets.load_dataset("json", data_files=str(source), cache_dir=str(folder / "cache"), split="train")
    rows = rows.map(checked, num_proc=2)
    rows.select(range(len(rows) - 100)).to_json(folder / "train.jsonl", num_proc=2)
    rows.select(range(len(rows) - 100, len(rows))).to_json(folder / "val.jsonl")


def checked(row: dict) -> dict:
    """The row, or an error: what rl_prep asks of it."""
    from nemotron_steps.rows.layouts import read_request
    from nemotron_steps.steps.data_prep.rl_prep import EnvironmentChecks

    global _checks
    _checks = _checks or EnvironmentChecks()
    read_request(row, "row")
    _checks("row", row)
    return row


_checks = None


def measure(which: str, source: Path) -> dict[str, float]:
    """Wall and processor seconds and peak MiB of one preparation in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        command = [sys.executable, "-m", "benchmarks.bench_data_prep", which, str(source), folder]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            disk = 0
            while process.poll() is None:
                disk = max(disk, size_of(Path(folder)))
                time.sleep(0.2)
            wall = time.perf_counter() - started
            assert process.stdout is not None
            told = process.stdout.read()
        if process.returncode:
            raise SystemExit(process.returncode)
    return {"wall_s": wall, "disk_mb": disk / 1e6, **json.loads(told.splitlines()[-1])}


def size_of(folder: Path) -> int:
    """Bytes of the files in a folder that a process is writing."""
    found = 0
    for path in folder.rglob("*"):
        try:
            found += path.stat().st_size
        except FileNotFoundError:  # removed since it was listed
            continue
    return found


def main(sizes: tuple[int, ...], *, small: bool) -> None:
    """Print a table."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for count in sizes:
            source = Path(folder) / f"{count}.jsonl"
            size = write_rows(source, count, small=small)
            for which in ("ours",) if small else ("ours", "theirs"):
                taken = measure(which, source)
                found.append({"rows": count, "mb": size / 1e6, "which": which, **taken})
                print(
                    f"{count:>10,} rows {size / 1e6:>7.0f} MB  {which:<7} {taken['wall_s']:>7.1f} s"
                    f" {count / taken['wall_s']:>9,.0f} rows/s  {taken['processor_s']:>6.1f} processor s"
                    f" {taken['peak_mib']:>6.0f} MiB  disk {taken['disk_mb']:>7.0f} MB",
                    flush=True,
                )
            source.unlink()
    print(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in ("ours", "theirs"):
        before = time.perf_counter()
        {"ours": ours, "theirs": theirs}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
        usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        figures = {
            "work_s": time.perf_counter() - before,
            "processor_s": sum(each.ru_utime + each.ru_stime for each in usage),
            "peak_mib": max(each.ru_maxrss for each in usage) / 1024,
        }
        print(json.dumps(figures))
    else:
        given = [each for each in sys.argv[1:] if each != "--small"]
        main(tuple(int(size) for size in given) or SIZES, small="--small" in sys.argv)
