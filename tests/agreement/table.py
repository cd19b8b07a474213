"""The table of agreement in docs/environments.md, between two markers: written by the comparison, and read back by it
and by the test."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BEGIN, END = "<!-- agreement: begin -->", "<!-- agreement: end -->"
HEAD = "| environment | answers | agree | differ | ours / theirs | why |\n|---|---|---|---|---|---|"


@dataclass(frozen=True)
class Deviation:
    """Answers on which the verdicts differ for one reason; the two verdicts are the commonest."""

    count: int
    ours: str
    theirs: str
    why: str


@dataclass(frozen=True)
class Line:
    """A verifier's agreement."""

    name: str
    answers: int
    agree: int
    deviations: tuple[Deviation, ...]

    @property
    def percent(self) -> float:
        """Answers that agree, of a hundred."""
        return 100 * self.agree / self.answers

    def rows(self) -> list[str]:
        """Table rows: the verifier with its first deviation, and one for each other."""
        told = [f"{each.count} | {each.ours} / {each.theirs} | {each.why}" for each in self.deviations] or ["0 | | "]
        first = f"| {self.name} | {self.answers} | {self.percent:.1f} % | {told[0]} |"
        return [first, *(f"| | | | {each} |" for each in told[1:])]


def read_table(page: str) -> list[Line]:
    """The lines of a page's table."""
    lines: list[Line] = []
    for row in page.partition(BEGIN)[2].partition(END)[0].strip().splitlines()[2:]:
        name, answers, _, count, verdicts, why = (cell.strip() for cell in row.strip()[1:-1].split("|"))
        ours, _, theirs = verdicts.partition(" / ")
        told = (Deviation(int(count), ours, theirs, why),) if int(count) else ()
        if name:
            lines.append(Line(name, int(answers), int(answers) - int(count), told))
        else:
            last = lines.pop()
            lines.append(Line(last.name, last.answers, last.agree - int(count), last.deviations + told))
    return lines


def write_table(page: Path, lines: Sequence[Line]) -> None:
    """Replace the lines of some verifiers in a page; the others stay, sorted by name."""
    text = page.read_text()
    if BEGIN not in text or END not in text:
        raise SystemExit(f"{page}: expected the markers {BEGIN} and {END}")
    known = {line.name: line for line in read_table(text)} | {line.name: line for line in lines}
    rows = [row for _, line in sorted(known.items()) for row in line.rows()]
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    page.write_text("\n".join([before + BEGIN, HEAD, *rows, END + after]))
