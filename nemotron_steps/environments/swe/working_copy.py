"""An agent's working copy of a repository: files in a sandbox session, and what was changed in them.

A task brings its files in the row (`files`), laid into a bubblewrap session, or names a container image that has the
repository at /testbed. What the agent has changed is read as plain files (`FilesCopy`) or as git's diff (`ImageCopy`):
symbolic links and repository metadata never leave the sandbox.

None of an agent's changes counts to what grades it: the tests are those of the task, and what steers a test run
(configuration, start-up files, repository metadata, compiled files) is that of the repository as it was.
"""

import base64
import binascii
import hashlib
import re
import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from nemotron_steps.environments.swe.harness import command_text, replaced, shortened, view_text
from nemotron_steps.errors import SandboxError
from nemotron_steps.sandbox.base import Outcome, SandboxResult
from nemotron_steps.sandbox.session import ServedSession

STEERING = frozenset(
    {
        *("conftest.py", "sitecustomize.py", "usercustomize.py"),
        *("pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg", "pyproject.toml"),
        *(".coveragerc", "noxfile.py"),
    }
)
TEST_FOLDERS = frozenset({"test", "tests"})
HIDDEN_FOLDERS = frozenset({".git", ".hg", ".svn", ".tox", ".nox", ".venv", "venv", "__pycache__", ".pytest_cache"})
COMPILED = frozenset({".pyc", ".pyo", ".so", ".pyd", ".pth", ".egg-link"})
RUNNERS = frozenset({"pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "xdist", "coverage", "nose"})
SOURCE_FOLDERS = frozenset({"src", "lib"})


def is_protected(path: str, known: Collection[str]) -> bool:
    """Whether a change to a file does not count."""
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts:
        return True
    if pure.name in STEERING or pure.suffix in COMPILED:
        return True
    if is_test(path) or not HIDDEN_FOLDERS.isdisjoint(pure.parts):
        return True
    if path in known:
        return False
    # A new file must not be imported instead of a module that runs the tests.
    parts = pure.parts[1:] if pure.parts[0] in SOURCE_FOLDERS and len(pure.parts) > 1 else pure.parts
    module = parts[0].partition(".")[0]
    if module not in sys.stdlib_module_names and module not in RUNNERS:
        return False
    # A package that the repository has itself, under a name of the standard library, is not shadowed by one more file.
    root = "/".join((*pure.parts[: len(pure.parts) - len(parts)], module))
    return not any(known_path == f"{root}.py" or known_path.startswith(f"{root}/") for known_path in known)


def is_test(path: str) -> bool:
    """Whether a file is one of tests by the usual names."""
    pure = PurePosixPath(path)
    folders = {part.lower() for part in pure.parts[:-1]}
    stem = pure.name.lower()
    return not TEST_FOLDERS.isdisjoint(folders) or (
        stem.endswith(".py") and (stem.startswith("test_") or stem.endswith("_test.py") or stem == "tests.py")
    )


FILES_ROOT = "/scratch/repo"
MAX_CHANGED_FILES = 200
FILE_BYTES = 512 * 1024
QUICK_S = 60.0

_DIFF = re.compile(r"^diff --git ", re.MULTILINE)
_LINK = re.compile(r"^(new file mode|index [0-9a-f.]+) 120000$", re.MULTILINE)
_SUM = re.compile(r"([0-9a-f]{64})  \./(.+)")


@dataclass(frozen=True)
class Changes:
    """What an agent has changed, without what does not count: of rows with files, path → new text (None: removed), of
    rows with an image git's diff; paths left out; why no change was read ("" where they were)."""

    files: Mapping[str, str | None] = field(default_factory=dict)
    patch: str = ""
    left_out: tuple[str, ...] = ()
    unread: str = ""

    def __bool__(self) -> bool:
        return bool(self.files) or bool(self.patch)


class WorkingCopy(ABC):
    """A repository in a session that has been entered; the agent sees `shown` characters of an output."""

    def __init__(self, session: ServedSession, root: str, shown: int) -> None:
        self.session = session
        self.root = root
        self._shown = shown

    @abstractmethod
    async def lay(self) -> None:
        """Put the repository into the session."""

    @abstractmethod
    async def changes(self) -> Changes:
        """What is not as it was."""

    @abstractmethod
    async def apply(self, changes: Changes) -> bool:
        """Make the changes in this copy; False if they do not fit."""

    async def apply_patch(self, patch: str) -> bool:
        if not patch:
            return True
        script = f"git -c safe.directory={shlex.quote(self.root)} apply --whitespace=nowarn -"
        return (await self._run("/bin/sh", "-c", script, stdin=patch)).ok

    async def bash(self, command: str, wall_s: float) -> str:
        # On a line of its own, so that a syntax error in the command stays the command's.
        result = await self.session.run(["/bin/bash", "-c", f"exec 2>&1\n{command}"], cwd=self.root, wall_s=wall_s)
        return command_text(result, self._shown)

    async def view(self, path: str, view_range: Any = None) -> str:
        content, problem = await self._read(path)
        if content is not None:
            return shortened(view_text(path, content, view_range), self._shown)
        listing = await self._run("find", path, "-maxdepth", "2", "-not", "-path", "*/.*")
        if problem == "folder" and listing.ok:
            return shortened("\n".join(sorted(listing.stdout.splitlines())), self._shown)
        return f"error: {problem}"

    async def edit(self, path: str, old: str, new: str) -> str:
        changed: str | None = new
        content, problem = await self._read(path)
        if old == "" and content is None and problem == f"there is no file {path}":
            answer = f"made {path}"
        elif content is None:
            return f"error: {'it is a folder' if problem == 'folder' else problem}"
        else:
            changed, answer = replaced(path, content, old, new)
        if changed is None:
            return answer
        script = 'mkdir -p "$(dirname -- "$1")" && cat > "$1"'
        written = await self._run("/bin/sh", "-c", script, "sh", path, stdin=changed)
        return answer if written.ok else f"error: {written.stderr.strip()[-200:] or 'the file cannot be written'}"

    async def _read(self, path: str) -> tuple[str | None, str]:
        """(text, "") of a file, or (None, what is there instead)."""
        script = f'if [ -d "$1" ]; then exit 3; elif [ ! -e "$1" ]; then exit 4; fi; head -c {FILE_BYTES + 1} -- "$1"'
        result = await self._run("/bin/sh", "-c", script, "sh", path)
        if result.ok and len(result.stdout.encode(errors="replace")) <= FILE_BYTES:
            return result.stdout, ""
        if result.ok:
            return None, f"{path} is longer than {FILE_BYTES} bytes"
        problems = {3: "folder", 4: f"there is no file {path}"}
        return None, problems.get(result.exit_code or 0, f"{path} cannot be read")

    async def _run(self, *argv: str, stdin: str = "") -> SandboxResult:
        return await self.session.run(argv, cwd=self.root, stdin=stdin, wall_s=QUICK_S)


class FilesCopy(WorkingCopy):
    """A repository out of a row's `files`."""

    def __init__(self, session: ServedSession, files: Mapping[str, str], shown: int) -> None:
        super().__init__(session, FILES_ROOT, shown)
        self._files = files

    async def lay(self) -> None:
        await self.session.write({f"{self.root}/{path}": text for path, text in self._files.items()})

    async def changes(self) -> Changes:
        """See WorkingCopy.changes. Files that are not UTF-8, or longer than FILE_BYTES, are left out."""
        skipped = ["-name", ".git", "-o", "-name", "__pycache__"]
        listing = await self._run(
            *("find", ".", "(", *skipped, ")", "-prune", "-o", "-type", "f", "-exec", "sha256sum", "--", "{}", "+")
        )
        if listing.outcome is not Outcome.EXITED:
            return Changes(unread="the files could not be listed")
        found = {match[2]: match[1] for line in listing.stdout.splitlines() if (match := _SUM.fullmatch(line))}
        known = {path: hashlib.sha256(text.encode()).hexdigest() for path, text in self._files.items()}
        differing = [path for path in sorted({*found, *known}) if found.get(path) != known.get(path)]
        if len(differing) > MAX_CHANGED_FILES:
            return Changes(unread=f"{len(differing)} files are changed, more than {MAX_CHANGED_FILES}")
        files: dict[str, str | None] = {}
        left_out = []
        for path in differing:
            content = None
            if path in found and not is_protected(path, known):
                content = await self._content(path)
            if is_protected(path, known) or (content is None and path in found):
                left_out.append(path)
            else:
                files[path] = content
        return Changes(files, left_out=tuple(left_out))

    async def apply(self, changes: Changes) -> bool:
        await self.session.write({f"{self.root}/{p}": text for p, text in changes.files.items() if text is not None})
        removed = [path for path, text in changes.files.items() if text is None]
        return not removed or (await self._run("rm", "-f", "--", *removed)).ok

    async def _content(self, path: str) -> str | None:
        result = await self._run("/bin/sh", "-c", f'head -c {FILE_BYTES + 1} -- "$1" | base64', "sh", path)
        try:
            raw = base64.b64decode(result.stdout)
            return raw.decode() if result.ok and len(raw) <= FILE_BYTES else None
        except (binascii.Error, UnicodeDecodeError):
            return None


class ImageCopy(WorkingCopy):
    """A repository that is in a container image, at `root`, with its git metadata."""

    def __init__(self, session: ServedSession, root: str, base_commit: str, shown: int) -> None:
        super().__init__(session, root, shown)
        self._base = base_commit or "HEAD"

    async def lay(self) -> None:
        """See WorkingCopy.lay: the image has it. The base is looked up now: a commit of the agent's moves HEAD."""
        script = f'git -c safe.directory={shlex.quote(self.root)} rev-parse --verify "$1^{{commit}}"'
        found = await self._run("/bin/sh", "-c", script, "sh", self._base)
        if not found.ok:
            raise SandboxError(
                "the container image does not have the repository",
                where=self.root,
                expected=f"a git repository with the commit {self._base}",
                found=found.stderr[-300:],
                hints=("env.nemo_gym.environments.swe_agent.repository=FOLDER",),
            )
        self._base = found.stdout.strip()

    async def changes(self) -> Changes:
        safe = f"git -c safe.directory={shlex.quote(self.root)} -c core.hooksPath=/dev/null -c core.fsmonitor=false"
        script = (
            f"{safe} add -A && {safe} diff --cached --no-ext-diff --no-textconv --no-renames --full-index"
            f" {shlex.quote(self._base)}"
        )
        result = await self.session.run(["/bin/sh", "-c", script], cwd=self.root, wall_s=QUICK_S)
        known = await self._run("/bin/sh", "-c", f"{safe} ls-tree -r --name-only {shlex.quote(self._base)}")
        if not result.ok or not known.ok:
            return Changes(unread="git tells no difference")
        paths = frozenset(known.stdout.splitlines())
        begins = [match.start() for match in _DIFF.finditer(result.stdout)]
        if len(begins) > MAX_CHANGED_FILES:
            return Changes(unread=f"{len(begins)} files are changed, more than {MAX_CHANGED_FILES}")
        kept, left_out = [], []
        for begin, end in zip(begins, [*begins[1:], len(result.stdout)], strict=False):
            piece = result.stdout[begin:end]
            path = _path_of(piece)
            if path is None or is_protected(path, paths) or _LINK.search(piece):
                left_out.append(path or piece.splitlines()[0])
            else:
                kept.append(piece)
        return Changes(patch="".join(kept), left_out=tuple(left_out))

    async def apply(self, changes: Changes) -> bool:
        return await self.apply_patch(changes.patch)


def _path_of(piece: str) -> str | None:
    """The file that a piece of git's diff is about; None if its name is quoted or told twice differently."""
    first = piece.partition("\n")[0]
    match = re.fullmatch(r"diff --git a/(.+) b/(.+)", first)
    return match[1] if match is not None and match[1] == match[2] else None
