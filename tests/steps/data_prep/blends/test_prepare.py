"""Every row of every source is written, or counted and named; nothing depends on how the work was cut up."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemotron_steps.config.schema.data_prep import SplitRows
from nemotron_steps.errors import DataError, WorkerLostError
from nemotron_steps.steps.data_prep.blends import formats, shards
from nemotron_steps.steps.data_prep.blends.prepare import Source
from nemotron_steps.steps.data_prep.blends.shards import RowFunction
from nemotron_steps.steps.data_prep.blends.sources import data_files
from tests.steps.data_prep.blends.conftest import Marked, Run, run_prepare, write_lines

LINES = st.one_of(
    st.integers(0, 10**30).map(lambda n: {"n": n, "text": "é\u2028\n" * (n % 5)}),
    st.integers(0, 3).map(lambda n: {"bad": n}),
    st.integers(0, 9).map(lambda n: {"twice": True, "n": n}),
    st.sampled_from([b"", b"   ", b"{oops", b"[1]", b'{"a": NaN}', b'{"a": "\\ud800"}', b'{"a": 1, "a": 2}', b"\xff"]),
)


@settings(max_examples=40, deadline=None)
@given(
    sources=st.lists(st.lists(LINES, max_size=20), min_size=1, max_size=3),
    weights=st.lists(st.sampled_from([0.3, 1.0, 2.0, 2.5]), min_size=3, max_size=3),
    sizes=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    part=st.integers(30, 300),
)
def test_rows_in_are_rows_out_and_refusals_for_any_mixture(sources, weights, sizes, part):
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "PART_BYTES", part)
        paths = [write_lines(Path(folder) / f"s{i}.jsonl", rows) for i, rows in enumerate(sources)]
        blend = [
            Source(path.stem, data_files(str(path), key="jsonl.path"), weight)
            for path, weight in zip(paths, weights, strict=False)
        ]
        split = SplitRows(validation=sizes[0], heldout=sizes[1])
        lines = [line for path in paths for line in path.read_bytes().splitlines() if not line.isspace() and line]
        try:
            done = run_prepare(Path(folder), blend, rows=split, max_refused_share=1.0)
        except DataError as error:
            assert "too few for the splits" in error.what
            return
        told = done.accounting
        assert told["read"] == len(lines)
        assert told["read"] + told["added"] == sum(told[key] for key in ("written", "refused", "left_out", "unused"))
        assert told["written"] == sum(len(done.lines(name)) for name in ("train", "validation", "heldout"))
        assert [len(done.lines(name)) for name in ("validation", "heldout")] == list(sizes)
        assert told["refused"] == len(done.refusals) == sum(told["refused_by_reason"].values())
        for refusal in done.refusals:
            (path,) = [p for p in paths if p.name == refusal["file"]]
            line = path.read_bytes().split(b"\n")[refusal["line"] - 1]
            assert b"bad" in line or line in (b"{oops", b"[1]", b"\xff")


class TestOneSource:
    ROWS = tuple({"n": i, "text": "é" * (i % 7)} for i in range(60))

    def test_unchanged_rows_are_the_same_bytes_in_the_same_order(self, small_parts: None, run: Run, tmp_path: Path):
        path = tmp_path / "mine.jsonl"
        lines = [b'{"b":1.50, "a" :[ ]}\n', b'{"x":"\\u00e9","n":123456789012345678901234567890}\n'] * 20
        path.write_bytes(b"".join(lines)[:-1])  # the last line has no newline
        done = run(path, rows=SplitRows(validation=3, heldout=2))
        assert done.lines("train") + done.lines("validation") + done.lines("heldout") == lines
        assert done.counts == {"train": 35, "validation": 3, "heldout": 2}

    @pytest.mark.parametrize("size", [7, 40, 10**6])
    def test_parts_of_any_size_give_the_same_files(self, run: Run, tmp_path: Path, monkeypatch, size: int):
        monkeypatch.setattr(formats, "PART_BYTES", size)
        path = write_lines(tmp_path / "mine.jsonl", [*self.ROWS[:30], b"", {"bad": 1}, *self.ROWS[30:]])
        done = run(path, rows=SplitRows(train=50, validation=2), max_refused_share=0.5)
        assert (done.rows(), done.rows("validation")) == (list(self.ROWS[:50]), list(self.ROWS[58:]))
        assert [(r["line"], r["reason"], r["field"]) for r in done.refusals] == [(32, "bad because of 1", "bad")]
        assert done.accounting["unused"] == 8

    def test_processes_give_what_one_gives(self, small_parts: None, run: Run, tmp_path: Path):
        path = write_lines(tmp_path / "mine.jsonl", [{"twice": i % 3 == 0, "n": i} for i in range(40)])
        one, several = run(path, name="one"), run(path, num_workers=2, name="several")
        assert one.lines() == several.lines() and len(one.lines()) == 54
        assert one.accounting == several.accounting

    def test_the_first_bad_row_is_named_by_its_line_in_the_file(self, small_parts: None, run: Run, tmp_path: Path):
        path = write_lines(tmp_path / "mine.jsonl", [*self.ROWS, {"bad": 7}, *self.ROWS, {"bad": 8}])
        with pytest.raises(DataError, match="2 of 122 rows cannot be used; the first: bad because of 7") as caught:
            run(path)
        assert caught.value.where == f"{path}:61 field bad"
        assert caught.value.hints == ("max_refused_share=0.02",)


class TestDisturbances:
    ROWS = tuple({"n": i} for i in range(200))

    def test_a_dead_worker_is_told_and_its_finished_shards_stay(self, small_parts: None, run: Run, tmp_path: Path):
        path = write_lines(tmp_path / "mine.jsonl", self.ROWS)
        with pytest.raises(WorkerLostError, match="worker process"):
            run(path, work=_Dies(), num_workers=2)
        assert run(path, name="again").rows() == list(self.ROWS)

    def test_a_kill_leaves_nothing_running_and_the_next_attempt_goes_on(
        self, small_parts: None, run: Run, tmp_path: Path, monkeypatch
    ):
        path = write_lines(tmp_path / "mine.jsonl", self.ROWS)
        program = (
            "import sys\nfrom pathlib import Path\n"
            "from nemotron_steps.steps.data_prep.blends import formats\n"
            "from tests.steps.data_prep.blends.test_prepare import Slow, run_prepare\n"
            "if __name__ == '__main__':\n"
            "    formats.PART_BYTES = 40\n"
            "    run_prepare(Path(sys.argv[1]), [Path(sys.argv[2])], work=Slow(), num_workers=2)\n"
        )
        script = tmp_path / "attempt.py"
        script.write_text(program)
        first = subprocess.Popen(
            [sys.executable, str(script), str(tmp_path), str(path)],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])},
        )
        staging = tmp_path / "shards"
        _wait(lambda: len(list(staging.glob("*.json"))) >= 10 if staging.exists() else False)
        children = psutil.Process(first.pid).children(recursive=True)
        first.send_signal(signal.SIGKILL)
        first.wait()
        assert len(children) >= 2
        _wait(lambda: not any(child.is_running() and child.status() != "zombie" for child in children))

        finished = {file.stem for file in staging.glob("*.json")}
        again: list[str] = []
        make = shards.make_shard
        monkeypatch.setattr(
            "nemotron_steps.steps.data_prep.blends.shards.make_shard",
            lambda task, function: again.append(task.name) or make(task, function),
        )
        assert run(path).rows() == list(self.ROWS)
        assert len(finished) >= 10 and again and not finished & set(again)
        assert not staging.exists()

    def test_a_file_that_changed_meanwhile_is_read_again(self, small_parts: None, run: Run, tmp_path: Path):
        path = write_lines(tmp_path / "mine.jsonl", self.ROWS)
        with pytest.raises(DataError, match="too few"):
            run(path, rows=SplitRows(validation=200))
        assert list((tmp_path / "shards").glob("*.json"))
        time.sleep(0.01)
        changed = [{"n": 9 - (row["n"] % 10)} for row in self.ROWS]
        write_lines(path, changed)
        assert run(path).rows() == changed


class _Dies(Marked):
    def __call__(self):
        os._exit(1)


class Slow(Marked):
    def __call__(self):
        become = super().__call__()

        def slow(where: str, row: dict[str, Any]) -> Any:
            time.sleep(0.02)
            return become(where, row)

        return slow


def _wait(condition, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def test_a_sample_is_of_each_source_and_stops_where_it_is_whole(small_parts: None, run: Run, tmp_path: Path):
    paths = [write_lines(tmp_path / f"{name}.jsonl", [{"of": name, "n": n} for n in range(30)]) for name in "ab"]
    made: list[Path] = []

    def work() -> RowFunction:
        made.append(tmp_path)
        return Marked()()

    done = run(*paths, sample=7, work=work)
    assert len(made) == len(paths)  # not for every part
    assert sorted((row["of"], row["n"]) for row in done.rows()) == [(name, n) for name in "ab" for n in range(7)]
    assert not (tmp_path / "shards").exists()
