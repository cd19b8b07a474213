"""What the documentation's pages say in code: their commands and their tables of keys."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LOOP = re.compile(r"for (\w+) in ([^;]+); do (.*); done")
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)


def read(page: str) -> str:
    """The text of a page in docs."""
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


def blocks(text: str, *languages: str) -> list[str]:
    """Fenced blocks in one of the languages ("" for none)."""
    return [body for _, language, body in FENCE.findall(text) if language in languages]


@dataclass(frozen=True)
class Command:
    """A `steps` or `nemotron` command as a page shows it."""

    page: str
    words: list[str]
    environment: dict[str, str]
    refused: bool
    """Its remark says so."""

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


def commands(page: Path) -> list[Command]:
    """Those of a page's blocks, fenced or indented, and those that stand in its sentences with what they are about.

    A line with `[…]` or `|` is a synopsis and no command; what stands after two spaces or `#` is a remark. A shell's
    loop is the commands that it comes to, and `eval "$(COMMAND)"` is its command.
    """
    name = page.relative_to(ROOT).as_posix()
    text = re.sub(r" *\\\n\s*", " ", page.read_text(encoding="utf-8"))
    lines = [line.strip() for block in blocks(text, "", "sh", "bash") for line in block.splitlines()]
    prose = FENCE.sub("", text)
    lines += [line.strip() for line in prose.splitlines() if line.startswith("    ")]
    # What is typed on the page of errors is wrong, and tests/hints type it; test_pages.py types what is on the public
    # pages; a decision tells of its time.
    if name not in ("docs/errors.md", "docs/pages.md") and not name.startswith("docs/decisions/"):
        lines += [" ".join(said.split()) for said in re.findall(r"`((?:steps|nemotron) \w+ [^-`][^`]*)`", prose)]
    found = []
    for line in (each for written in lines for each in _unrolled(written)):
        program = re.match(r"((?:[A-Z_]+=\S+ )*)((?:steps|nemotron) .*)", line)
        if program is None or re.search(r" \[|…|[^ ]\||\| ", line):
            continue
        environment = dict(each.split("=", 1) for each in program[1].split())
        for part in program[2].split("; "):
            said, *remarks = re.split(r"\s{2,}| # ", part)
            if said.startswith(("steps ", "nemotron ")):
                found.append(Command(name, shlex.split(said), environment, any("refused" in each for each in remarks)))
    return found


def _unrolled(line: str) -> list[str]:
    line = re.sub(r'^eval "\$\(([^)]*)\)"', r"\1", line)
    loop = LOOP.fullmatch(line)
    return [loop[3].replace(f"${loop[1]}", value) for value in loop[2].split()] if loop else [line]


def cells(page: Path, column: int) -> list[str]:
    """The code that stands in one column of a page's tables."""
    rows = [line.split("|") for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    return [code for row in rows for code in re.findall(r"`([^`]+)`", row[column + 1])]
