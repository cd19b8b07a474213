"""Goldens: what every config composes to, and the keys of every schema, as digests.

    python -m tests.guards.goldens            # compares with goldens.json; exit code 1 where something differs
    python -m tests.guards.goldens --write    # takes them anew, in a commit that says what differs and why
    python -m tests.guards.goldens --dump DIR # writes what is digested, for `diff -r` of two commits' folders

A config's text is that of `steps run STEP -c NAME -d --json`, refusals included, without what this machine decides.
`--artifacts TARGET...` runs `steps run TARGET` in an empty home and compares the digests of what it made; they hold on
one kind of processor only, so `--write` keeps them in the file that `--artifacts-file` names.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
GOLDENS = Path(__file__).with_name("goldens.json")
STEPS = [sys.executable, "-m", "nemotron_steps.cli.main"]


def main() -> int:
    """Compare, write or dump."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--dump", type=Path, metavar="DIR")
    parser.add_argument("--artifacts", nargs="+", metavar="TARGET", help='such as "rl/nemo_rl/rlhf -c tiny"')
    parser.add_argument("--artifacts-file", type=Path, default=ROOT / "build" / "artifacts.json", metavar="FILE")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        texts = _artifacts(arguments.artifacts, home) if arguments.artifacts else {**_configs(home), **_keys()}
    if arguments.dump:
        for name, text in texts.items():
            file = arguments.dump / f"{name.replace('/', '+')}.txt"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, "utf-8")
    file = arguments.artifacts_file if arguments.artifacts else GOLDENS
    found = {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in sorted(texts.items())}
    if arguments.write:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found, indent=0) + "\n", "utf-8")
    known = json.loads(file.read_text("utf-8"))
    differing = sorted(name for name in known.keys() | found.keys() if known.get(name) != found.get(name))
    for name in differing:
        print(f"{'new' if name not in known else 'gone' if name not in found else 'differs'}  {name}")
    print(f"{len(found)} goldens, {len(differing)} differ")
    return int(bool(differing))


def _configs(home: str) -> dict[str, str]:
    """`STEP -c NAME` → what its dry run prints."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("STEPS_")}
    environment |= {"STEPS_HOME": home, "HOME": home}
    configs = sorted(path for path in (ROOT / "configs").rglob("*.yaml") if path.parent.name != "base")

    def dry_run(path: Path) -> tuple[str, str]:
        target = f"{path.parent.relative_to(ROOT / 'configs')} -c {path.stem}"
        done = subprocess.run(
            [*STEPS, "run", *target.split(), "-d", "--json"],
            cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )  # fmt: skip
        return target, f"exit code {done.returncode}\n{done.stdout}".replace(home, "HOME").replace(str(ROOT), "ROOT")

    with ThreadPoolExecutor(2) as pool:
        return dict(pool.map(dry_run, configs))


def _keys() -> dict[str, str]:
    """Schema → its keys, one a line."""
    from nemotron_steps.config.validation import known_keys, load_schema
    from nemotron_steps.manifest.registry import load_registry

    schemas = {manifest.step.config_schema for manifest in load_registry().steps.values()}
    return {f"keys {name}": "\n".join(known_keys(load_schema(name))) for name in sorted(filter(None, schemas))}


def _artifacts(targets: list[str], home: str) -> dict[str, str]:
    """Artifact of a target's chain → the digest of what it holds."""
    environment = {**os.environ, "STEPS_HOME": home}
    for target in targets:
        subprocess.run(
            [*STEPS, "run", *target.split()], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, check=True
        )
    listed = subprocess.run(
        [*STEPS, "artifacts", "list", "--json"], env=environment, capture_output=True, text=True, check=True
    )
    return {artifact["name"]: artifact["digest"] for artifact in json.loads(listed.stdout)}


if __name__ == "__main__":
    sys.exit(main())
