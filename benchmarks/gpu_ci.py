"""Tests and speed on one GPU, in at most 15 minutes: figures as JSON, and whether each is within its bounds.

    scripts/gpu_ci.sh [--out FILE] [--figures-only]

The bounds of a GPU's name are in gpu_bounds.json beside this file: the least and the most that each figure may be. A
figure outside of them, or one that is missing, is a failure, as a failed test is. On a GPU without bounds the figures
are written, and bounds 15 % around them are printed, to be added to the file.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as xml
from pathlib import Path

import torch

from nemotron_steps import __version__

BOUNDS = Path(__file__).with_name("gpu_bounds.json")
TESTS_S, PART_S = 420, 300
"""The longest that the tests, or one measurement, may take."""
KEPT = (
    "step_s",
    "peak_gpu_gib",
    "train_mfu",
    "token_mult_prob_error",
    "refit_s",
    "phases_s.generation",
    "phases_s.train",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_ci.json"))
    parser.add_argument("--figures-only", action="store_true", help="no tests")
    asked = parser.parse_args()
    started, problems = time.monotonic(), []
    with_vllm = importlib.util.find_spec("vllm") is not None
    report = {
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "version": __version__,
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip() or None,
    }
    if not asked.figures_only:
        report["tests"] = tests(with_vllm)
        if report["tests"]["failed"] or not report["tests"]["passed"]:
            problems.append(f"tests: {report['tests']['failed']} failed, {report['tests']['passed']} passed")
    figures = report["figures"] = {}
    for part in ("embedded", "vllm") if with_vllm else ("embedded",):
        figures.update({f"{part}.{name}": value for name, value in measured(part).items()})
    bounds = json.loads(BOUNDS.read_text()).get(report["gpu"])
    if bounds is None:
        found = {name: [round(value * 0.85, 4), round(value * 1.15, 4)] for name, value in figures.items()}
        print(f"no bounds for this GPU; to keep these figures, add to {BOUNDS}:", json.dumps({report["gpu"]: found}))
    else:
        for name, (least, most) in bounds.items():
            if name.startswith("vllm") and not with_vllm:
                continue
            value = figures.get(name)
            if value is None or not least <= value <= most:
                problems.append(f"{name} is {value}, and should be {least} to {most}")
    report |= {"seconds": round(time.monotonic() - started), "problems": problems}
    asked.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
    for problem in problems:
        print(f"FAILED {problem}")
    return bool(problems)


def tests(with_vllm: bool) -> dict[str, int]:
    """How many tests of the mark `cuda` passed and failed; one that does not end counts as failed."""
    which = "cuda and not slurm" if with_vllm else "cuda and not vllm and not ray and not slurm"
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "junit.xml")
        command = [sys.executable, "-m", "pytest", "--cuda", "-m", which, "-q", "-p", "no:cacheprovider"]
        try:
            subprocess.run([*command, f"--junitxml={report}"], timeout=TESTS_S)
        except subprocess.TimeoutExpired:
            return {"passed": 0, "failed": 1, "skipped": 0}
        suite = xml.parse(report).getroot()[0]
    count = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = count["failures"] + count["errors"]
    return {"passed": count["tests"] - failed - count["skipped"], "failed": failed, "skipped": count["skipped"]}


def measured(part: str) -> dict[str, float]:
    """GRPO steps of the 0.5 B model of bench_gpu.py with this generator."""
    command = [sys.executable, "-m", "benchmarks.bench_gpu", "--parts", part, "--steps", "10"]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=PART_S)
        found = json.loads(done.stdout.strip().splitlines()[-1])[part]
    except (subprocess.TimeoutExpired, IndexError, KeyError):
        return {}
    found |= {f"phases_s.{name}": value for name, value in found.get("phases_s", {}).items()}
    return {name: round(found[name], 4) for name in KEPT if found.get(name) is not None}


if __name__ == "__main__":
    raise SystemExit(main())
