"""THIRD_PARTY.md from what is installed: each package that requirements/constraints.txt pins, with its licence.

    python scripts/third_party.py [--check]      in the environment of `make setup-test`

--check: exit code 1 where the file does not list the packages and versions that are pinned.
"""

import re
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "THIRD_PARTY.md"
HEAD = """# Packages of others

What `requirements/constraints.txt` pins, which is what the tests ran with, the licence that each package states, and
what needs it: the core, or the extra that brings it (no word: vLLM on CPU, or building). None of it is part of this
project's wheel. Written by `scripts/third_party.py`.

| package | version | licence | for |
|---|---|---|---|
"""
EXTRAS = ("engine", "ray", "lepton", "wandb", "tensorboard", "mlflow", "s3", "data", "vllm", "dev")


ON_INDEX = {
    "editables": "MIT",
    "greenlet": "MIT AND PSF-2.0",
    "hatchling": "MIT",
    "oss-harmony": "Apache-2.0",
    "tomlkit": "MIT",
    "trove-classifiers": "Apache-2.0",
    "zss": "BSD",
}
"""Of packages that are pinned and not installed by the tests, or state none themselves: what the index has of them."""


def main() -> int:
    """Write or check; the exit code."""
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "requirements/constraints.txt").read_text(), re.MULTILINE))
    if "--check" in sys.argv:
        listed = dict(re.findall(r"^\| ([\w.-]+) \| (\d\S*) \|", TARGET.read_text(), re.MULTILINE))
        for name in sorted(pinned.keys() | listed.keys()):
            if pinned.get(name) != listed.get(name):
                print(f"{name}: {pinned.get(name)} is pinned, THIRD_PARTY.md has {listed.get(name)}")
        return int(pinned != listed)
    reasons = needed_for()
    rows = []
    for name, version in pinned.items():
        rows.append(f"| {name} | {version} | {licence(name)} | {reasons.get(key(name), '')} |")
    TARGET.write_text(HEAD + "\n".join(rows) + "\n")
    return 0


def key(name: str) -> str:
    """The name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def found(name: str) -> Distribution | None:
    """What is installed under a name."""
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def licence(name: str) -> str:
    """Its SPDX expression, else its classifiers', else the first line of its licence field."""
    package = found(name)
    if name in ON_INDEX or package is None:
        return ON_INDEX.get(name, "not installed")
    said = package.metadata
    classified = [each.split(" :: ")[-1] for each in said.get_all("Classifier", []) if each.startswith("License ::")]
    stated = said.get("License-Expression") or ", ".join(each for each in classified if each != "OSI Approved")
    stated = stated or next(iter((said.get("License") or "").strip().splitlines()), "")
    return stated.replace("|", "/")[:120] or "not stated"


def needed_for() -> dict[str, str]:
    """Package → `core`, or the first extra that brings it."""
    needs = found("nemotron-steps").requires or []  # type: ignore[union-attr]
    reasons: dict[str, str] = {}

    def visit(requirement: str, reason: str, extras: set[str]) -> None:
        name, _, condition = requirement.partition(";")
        match = re.match(r"\s*([\w.-]+)(?:\[([^\]]*)\])?", name)
        wanted = re.search(r"extra == ['\"]([\w.-]+)['\"]", condition)
        if match is None or (wanted and wanted[1] not in extras) or key(match[1]) in reasons:
            return
        reasons[key(match[1])] = reason
        package = found(match[1])
        for each in (package.requires or []) if package else []:
            visit(each, reason, set((match[2] or "").replace(" ", "").split(",")))

    for extra in ("", *EXTRAS):
        for requirement in needs:
            if bool(extra) == ("extra ==" in requirement):
                visit(requirement, extra or "core", {extra})
    return reasons


if __name__ == "__main__":
    raise SystemExit(main())
