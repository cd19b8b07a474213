"""A step under test: its manifest, what it is fed, and its runs in processes of their own, each made once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemotron_steps.artifacts.files import sha256_file
from nemotron_steps.manifest.models import StepManifest
from nemotron_steps.manifest.packs import PATH_VARIABLE
from nemotron_steps.manifest.registry import Registry, load_registry
from nemotron_steps.testing.suite import NotApplicable, Unmet

if TYPE_CHECKING:
    from nemotron_steps.resolver.request import StepConfig
    from nemotron_steps.session.session import Session

Source = str | Path | Callable[[Path], Path]

CANARY = "kit-4f1c9e0b7a53-canary"
"""Value of a secret variable while a step runs: it must be found nowhere afterwards."""
ROWS = 8
PICTURE = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\xff\xfe" * 8


@dataclass(frozen=True)
class Ran:
    """A process of commands: what each printed, what was seen, how it ended (negative: by a signal)."""

    home: Path
    commands: list[dict[str, Any]]
    seen: Mapping[str, Any]
    code: int
    output: str = ""

    def result(self, index: int = 0) -> dict[str, Any]:
        """The JSON that a command printed."""
        out = self.commands[index]["out"]
        try:
            found: dict[str, Any] = json.loads(out)
        except ValueError:
            raise Unmet("`steps run --json` printed something else than JSON", found=repr(out[:300])) from None
        return found

    def error(self, index: int = 0) -> dict[str, Any] | None:
        """The error that a command told, or that the process was over before it did; None where there is none."""
        if index >= len(self.commands):
            return {"what": f"its process died with exit code {self.code}: {self.output[-400:]}"}
        error = self.result(index).get("error")
        return error if isinstance(error, dict) else None


@dataclass(eq=False)
class StepSubject:
    """What the checks of a step ask. Its arguments are those of `step_conformance`; `folder` is for what runs write."""

    name: str
    folder: Path
    config: str | None = None
    inputs: Mapping[str, Source] = field(default_factory=dict)
    overrides: Sequence[str] = ()
    seconds: float = 60.0
    fed_before: dict[str, dict[str, str]] = field(default_factory=dict)

    @cached_property
    def registry(self) -> Registry:
        """Every manifest that is found here."""
        return load_registry()

    @property
    def bench(self) -> Session:
        """A new one, which composes anew; the manifests are read once."""
        from nemotron_steps.session.session import Session

        return Session(str(self.folder / "home"), registry=self.registry)

    def words(
        self,
        home: Path,
        *,
        inputs: Mapping[str, Path] | None = None,
        overrides: Sequence[str] = (),
        config: str | None = None,
    ) -> list[str]:
        """A run's words after `steps`."""
        name = config or self.config_name
        words = ["run", self.name, *self.overrides, *overrides]
        words += ["-c", name] if name and name != "default" else []
        for port, path in (self.fed if inputs is None else inputs).items():
            words += ["--input", f"{port}={path}"]
        return [*words, "--home", str(home), "--json"]

    @cached_property
    def first(self) -> Ran:
        """A run, and the same again in the same home."""
        home = self.folder / "first"
        self.fed_before = {port: tree_of(path) for port, path in self.fed.items()}
        return self.process("first", [self.words(home)] * 2, home=home)

    @cached_property
    def second(self) -> Ran:
        """A run in another home, by another process: other hashes, folders and variables."""
        home = self.folder / "second" / "deeper"
        return self.process("second", [self.words(home)], home=home, variables={"PYTHONHASHSEED": "2", "LANG": "C"})

    def process(
        self,
        name: str,
        commands: Sequence[Sequence[str]],
        *,
        home: Path,
        variables: Mapping[str, str] | None = None,
        **watch: Any,
    ) -> Ran:
        """Run commands in a process and empty folders of their own. `watch`: further fields of its request."""
        place = self.folder / "processes" / name
        cache = self.folder / "cache"
        for folder in ("cwd", "tmp", "user"):
            (place / folder).mkdir(parents=True, exist_ok=True)
        request, result = place / "request.json", place / "result.json"
        asked = {
            "commands": [list(words) for words in commands],
            "allowed": [str(home), str(place / "tmp"), str(cache)],
            "inside": str(home / "work"),
            "step": self.manifest.id,
            "package": self.entry_module.partition(".")[0],
            **watch,
        }
        request.write_text(json.dumps(asked))
        result.unlink(missing_ok=True)
        with (place / "output.txt").open("w+b") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "nemotron_steps.testing.watching", str(request), str(result)],
                cwd=place / "cwd",
                env={**process_environment(place, cache, self.registry), **(variables or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                code = process.wait(timeout=60 + self.seconds * len(commands))
            except subprocess.TimeoutExpired:
                raise Unmet(
                    f"{' '.join(commands[0][:2])} did not end within {self.seconds:.0f} s",
                    hint="run a config `tiny`, or give the kit more: seconds=…",
                ) from None
            finally:
                with suppress(ProcessLookupError):  # nothing is left of its session
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            output.seek(0)
            text = output.read().decode("utf-8", "replace")
        done: dict[str, Any] = json.loads(result.read_text()) if result.is_file() else {"commands": [], "seen": {}}
        return Ran(home, done["commands"], done["seen"], code, text)

    @cached_property
    def manifest(self) -> StepManifest:
        """The step's. Raises the error that the manifest has, or that there is none."""
        return self.registry.step(self.name)

    @property
    def config_name(self) -> str | None:
        """The config that runs use."""
        names = self.manifest.config_names
        return self.config or next((name for name in ("tiny", "default") if name in names), None)

    @property
    def entry_module(self) -> str:
        """The module of the step's function."""
        return (self.manifest.step.entry or "").partition(":")[0]

    @property
    def schema(self) -> Any:
        """The class of the config model."""
        from nemotron_steps.config.validation import load_schema

        if self.manifest.step.config_schema is None:
            raise NotApplicable("the step has no config model")
        return load_schema(self.manifest.step.config_schema)

    def compose(
        self, overrides: Sequence[str] = (), config: str | None = None, *, as_it_is: bool = False
    ) -> StepConfig:
        """A config of the step, checked by its model; `as_it_is`: without the overrides of the kit's runs."""
        given = [*(() if as_it_is else self.overrides), *overrides]
        return self.bench.compose(self.manifest.id, config or self.config_name, given)

    @cached_property
    def fed(self) -> dict[str, Path]:
        """Port → what runs feed it. Ports of the built-in types of rows have a sample; optional ones stay empty."""
        sourced = self.compose().inputs
        fed: dict[str, Path] = {}
        for port in self.manifest.consumes:
            if port.name in self.inputs:
                source = self.inputs[port.name]
                folder = self.folder / "inputs" / port.name
                folder.mkdir(parents=True, exist_ok=True)
                fed[port.name] = (source(folder) if callable(source) else Path(source)).absolute()
            elif port.required and port.name not in sourced:
                sample = write_sample(port.type, self.folder / "inputs" / port.name)
                if sample is None:
                    raise Unmet(
                        f"nothing is known to feed the input '{port.name}' with, a {port.type}",
                        where=self.manifest.where_input(port.name),
                        hint=f'step_conformance("{self.name}", inputs={{"{port.name}": PATH}})',
                    )
                fed[port.name] = sample
        return fed

    def leftovers(self, name: str, folder: str) -> list[str]:
        """What a process left in its working directory (`cwd`), temporary folder (`tmp`) or HOME (`user`)."""
        place = self.folder / "processes" / name / folder
        return sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file())

    def digests(self, ran: Ran, index: int = 0) -> dict[str, str]:
        """Output port → digest of what a command of `ran` made."""
        from nemotron_steps.artifacts.store import ArtifactStore

        store = ArtifactStore(ran.home)
        (step,) = [step for step in ran.result(index)["steps"] if step["step"] == self.manifest.id]
        return {port: store.find(output["ref"]).digest for port, output in step["outputs"].items()}


def process_environment(place: Path, cache: Path, registry: Registry) -> dict[str, str]:
    """Variables of a process that runs in the folders of `place`."""
    packs = [str(pack.base) for pack in registry.packs if pack.origin in (PATH_VARIABLE, "working directory")]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("STEPS_")}
    return {
        **kept,
        "HOME": str(place / "user"),
        "PYTHONUSERBASE": os.environ.get("PYTHONUSERBASE", str(Path.home() / ".local")),
        "TMPDIR": str(place / "tmp"),
        "XDG_CACHE_HOME": str(cache),
        "XDG_CONFIG_HOME": str(place / "user"),
        "MPLCONFIGDIR": str(cache / "matplotlib"),  # made where matplotlib is imported
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "1",
        "KIT_API_KEY": CANARY,
        PATH_VARIABLE: os.pathsep.join(packs),
    }


def files_of(path: Path) -> list[Path]:
    """The files of a folder, sorted, or the one file."""
    return sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]


def tree_of(path: Path) -> dict[str, str]:
    """File → digest of its bytes, of a file or a folder."""
    return {str(file): sha256_file(file) for file in files_of(path)}


def cut(data: bytes) -> bytes:
    """The first part of a file's bytes: it ends in the middle of something."""
    return data[: max(1, len(data) * 2 // 3 - 3)]


def _samples(n: int) -> dict[str, dict[str, Any]]:
    question, answer = f"What is {n} + {n}?", f"It is {2 * n}."
    return {
        "training_jsonl": {"text": f"{question} {answer}"},
        "sft_chats": {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]},
        "packed_chats": {"input_ids": [n, 2, 3, n, 4], "loss_mask": [0, 1, 0, 1, 0], "seq_start_id": [0, 3]},
        "preference_pairs": {"prompt": question, "chosen": answer, "rejected": f"It is {2 * n + 1}."},
        "rl_prompts": {
            "responses_create_params": {"input": [{"role": "user", "content": question}]},
            "question": question,
            "expected_answer": str(2 * n),
            "agent_ref": {"type": "responses_api_agents", "name": "math_with_judge_simple_agent"},
        },
    }


def write_sample(type_name: str, folder: Path) -> Path | None:
    """Write a data set of a built-in type into `folder`; None for a type that there is no sample of."""
    texts: dict[str, str] = {}
    if type_name == "eval_report":
        texts["report.json"] = json.dumps({"metrics": {"accuracy": 0.5}})
    elif type_name in _samples(1):
        rows = "".join(json.dumps(_samples(n)[type_name]) + "\n" for n in range(1, ROWS + 1))
        texts = {"train.jsonl": rows, "validation.jsonl": rows}
    else:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder
