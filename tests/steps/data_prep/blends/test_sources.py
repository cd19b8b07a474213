"""One data set in every form it may have: the same rows come out, and what is wrong with one is told once."""

from __future__ import annotations

import csv
import gzip
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from nemotron_steps.config.schema.data_prep import DataPrepConfig
from nemotron_steps.errors import DataError, RetryableError, show_line
from nemotron_steps.steps.data_prep.blends import formats
from nemotron_steps.steps.data_prep.blends.prepare import Source, sources_of
from nemotron_steps.steps.data_prep.blends.shards import RowFunction
from nemotron_steps.steps.data_prep.blends.sources import HubName, data_files, hub_name, unreachable
from tests.steps.data_prep.blends.conftest import Run, write_lines

ROWS = [{"n": i, "text": "é" * (i % 3), "list": [{"a": i}], "none": None, "real": i / 7} for i in range(50)]


@dataclass(frozen=True)
class Seventh:
    """Refuses row 7."""

    def function(self) -> RowFunction:
        def become(where: str, row: dict[str, Any]) -> None:
            if row["n"] == 7:
                raise DataError("the row is the seventh", where=where, hints=show_line(where))

        return become


def files(path: str, **choices: Any) -> Source:
    return Source("it", data_files(path, key="input_path", **choices))


def as_gzip(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))


def as_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=16)


def as_saved(folder: Path, rows: list[dict[str, Any]]) -> None:
    """The layout of `Dataset.save_to_disk`: Arrow streams, named in order by state.json."""
    pyarrow = pytest.importorskip("pyarrow")
    folder.mkdir()
    names = ["data-00001-of-00002.arrow", "data-00000-of-00002.arrow"]
    for name, some in zip(names, (rows[:20], rows[20:]), strict=True):
        table = pyarrow.Table.from_pylist(some)
        with pyarrow.ipc.new_stream(folder / name, table.schema) as out:
            out.write_table(table)
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))


@pytest.mark.parametrize("write", [write_lines, as_gzip, as_parquet, as_saved])
def test_every_format_gives_the_same_rows(write: Callable[..., Any], run: Run, tmp_path: Path):
    write(tmp_path / "given", ROWS)
    done = run(files(str(tmp_path / "given")), num_workers=2)
    assert done.rows() == ROWS


@pytest.mark.parametrize(("name", "delimiter"), [("t.csv", ","), ("t.tsv", "\t")])
def test_a_table_of_a_spreadsheet_is_read_whatever_its_cells_hold(name: str, delimiter: str, run: Run, tmp_path: Path):
    rows = [{"first": "a, b\tc", "second": "two\nlines"}, {"first": 'he said "é"', "second": ""}]
    with (tmp_path / name).open("w", encoding="utf-8-sig", newline="") as file:  # with a byte order mark
        writer = csv.DictWriter(file, ["first", "second"], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    assert run(files(str(tmp_path / name))).rows() == rows


@pytest.mark.parametrize("cells", ["1", "1,2,3"])
def test_a_line_with_too_few_or_too_many_cells_is_named(cells: str, run: Run, tmp_path: Path):
    (tmp_path / "t.csv").write_text(f"first,second\n1,2\n{cells}\n")
    with pytest.raises(DataError, match="another number of columns than the header") as caught:
        run(files(str(tmp_path / "t.csv")))
    assert (caught.value.where, caught.value.expected) == (f"{tmp_path}/t.csv:3", "2 columns")


@pytest.mark.parametrize("write", [as_parquet, as_saved])
@pytest.mark.parametrize("size", [1, 19])
def test_rows_of_columnar_files_are_read_in_pieces_without_losing_any(
    write: Callable[..., Any], size: int, run: Run, tmp_path: Path, monkeypatch
):
    monkeypatch.setattr(formats, "_BATCH", size)
    write(tmp_path / "given", ROWS)
    assert run(files(str(tmp_path / "given"))).rows() == ROWS


def test_a_json_file_beside_rows_is_none_of_them_and_alone_it_is_the_list(tmp_path: Path):
    (tmp_path / "info.json").write_text(json.dumps(ROWS[:2]))
    assert [file.name for file in files(str(tmp_path)).files] == ["info.json"]
    write_lines(tmp_path / "rows.jsonl", ROWS[:1])
    assert [file.name for file in files(str(tmp_path)).files] == ["rows.jsonl"]


def test_a_folder_of_mixed_files_is_read_in_name_order(run: Run, tmp_path: Path):
    folder = tmp_path / "in"
    write_lines(folder / "b" / "rows.jsonl", ROWS[10:20])
    as_gzip(folder / "a.jsonl.gz", ROWS[:10])
    as_parquet(folder / "c.parquet", ROWS[20:])
    (folder / "README.md").write_text("not rows")
    assert run(files(str(folder))).rows() == ROWS


@pytest.mark.parametrize("address", ["file://{folder}/rows.jsonl", "file://{folder}", "memory://prep/rows.jsonl"])
def test_any_address_that_fsspec_opens_is_a_source(address: str, run: Run, tmp_path: Path, monkeypatch):
    import fsspec

    monkeypatch.setattr(formats, "PART_BYTES", 64)
    folder = tmp_path / "in"
    text = write_lines(folder / "rows.jsonl", ROWS).read_bytes()
    with fsspec.open("memory://prep/rows.jsonl", "wb") as file:
        file.write(text)
    assert run(files(address.format(folder=folder))).rows() == ROWS


def test_json_lines_in_a_bucket_are_rows(run: Run, s3_url: str, monkeypatch):
    import fsspec

    monkeypatch.setattr(formats, "PART_BYTES", 64)
    text = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    with fsspec.open(f"{s3_url}/in/rows.jsonl", "wb") as file:
        file.write(text)
    assert run(files(f"{s3_url}/in/rows.jsonl")).rows() == ROWS
    assert run(files(f"{s3_url}/in"), name="folder").rows() == ROWS


class TestSplits:
    def test_a_split_is_the_files_with_its_name(self, tmp_path: Path):
        for name in ("data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl", "data/test-00000.jsonl"):
            write_lines(tmp_path / name, ROWS[:1])
        names = [file.name for file in files(str(tmp_path), split="train").files]
        assert names == ["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl"]
        with pytest.raises(DataError, match="no split 'math'") as caught:
            files(str(tmp_path), split="math")
        assert "data/test-00000.jsonl" in str(caught.value.found)
        # As an entry of a blend file has it: there is no such config key.
        assert caught.value.hints[:1] == ('"split": "test"   # in the blend file',)

    def test_files_whose_names_tell_no_split_are_train(self, tmp_path: Path):
        write_lines(tmp_path / "rlvr1.jsonl", ROWS[:1])
        assert len(files(str(tmp_path), split="train").files) == 1
        with pytest.raises(DataError, match="no split 'test'"):
            files(str(tmp_path), split="test")

    def test_a_subset_is_a_folder_or_a_prefix(self, tmp_path: Path):
        for name in ("math/train.jsonl", "code/train.jsonl"):
            write_lines(tmp_path / name, ROWS[:1])
        assert [file.name for file in files(str(tmp_path), subset="code", split="train").files] == ["code/train.jsonl"]

    @pytest.mark.parametrize(
        "word", ["train", "training", "validation", "valid", "val", "dev", "test", "testing", "eval"]
    )
    def test_where_one_file_tells_a_split_the_others_are_not_taken_for_train(self, word: str, tmp_path: Path):
        for name in ("other.jsonl", f"rows-{word.upper()}-0.jsonl"):
            write_lines(tmp_path / name, ROWS[:1])
        with pytest.raises(DataError, match="no split 'train'"):
            files(str(tmp_path), split="train")

    def test_a_split_is_a_whole_word_and_a_file_that_was_named_is_itself(self, tmp_path: Path):
        for name in ("math.jsonl", "mathematics.jsonl", "a_math-1.jsonl"):
            write_lines(tmp_path / name, ROWS[:1])
        assert [file.name for file in files(str(tmp_path), split="math").files] == ["a_math-1.jsonl", "math.jsonl"]
        named = str(tmp_path / "mathematics.jsonl")
        assert [file.name for file in files(named, split="validation").files] == ["mathematics.jsonl"]


class TestDamage:
    def test_a_cut_off_gzip_file_names_it(self, run: Run, tmp_path: Path):
        path = tmp_path / "rows.jsonl.gz"
        as_gzip(path, ROWS)
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(DataError, match="damaged or cut off") as caught:
            run(files(str(path)))
        assert caught.value.where == str(path)

    def test_a_parquet_file_that_is_none_names_it(self, run: Run, tmp_path: Path):
        pytest.importorskip("pyarrow")
        path = tmp_path / "rows.parquet"
        path.write_bytes(b"PAR1 but no more")
        with pytest.raises(DataError, match="damaged, or is none") as caught:
            run(files(str(path)))
        assert caught.value.where == str(path)

    def test_a_folder_without_data_says_what_is_read(self, tmp_path: Path):
        (tmp_path / "notes.md").write_text("x")
        with pytest.raises(DataError, match="no JSON Lines data") as caught:
            files(str(tmp_path))
        assert "parquet" in str(caught.value.expected)


class TestAddresses:
    def test_a_server_that_does_not_answer_may_be_tried_again(self):
        with pytest.raises(RetryableError, match="could not be fetched") as caught:
            files("http://127.0.0.1:9/rows.jsonl")
        assert caught.value.where == "input_path = http://127.0.0.1:9/rows.jsonl"

    def test_a_file_that_a_server_has_not_is_wrong(self, hub: str):
        with pytest.raises(DataError, match="no JSON Lines data"):
            files(f"{hub}/rows.jsonl")

    def test_json_lines_of_a_web_server_are_rows_and_are_fetched_once(self, web: WebServer, run: Run):
        assert run(files(f"{web.url}/rows.jsonl")).rows() == ROWS
        assert web.asked.count("GET") == 1
        assert run(files(f"{web.url}/rows"), name="unnamed").rows() == ROWS  # a file of any name

    @pytest.mark.parametrize("path", ["rows.jsonl", "rows", "list", "packed"])
    def test_a_signed_address_is_read_as_what_it_holds_and_named_without_its_signature(
        self, web: WebServer, run: Run, path: str
    ):
        source = files(f"{web.url}/{path}?sig=not/for.csv")
        assert [file.name for file in source.files] == [path]
        assert run(source).rows() == ROWS
        assert web.asked.count("GET") <= 2

    def test_what_a_refused_row_leaves_behind_does_not_open_a_signed_address(
        self, web: WebServer, run: Run, tmp_path: Path
    ):
        config = DataPrepConfig(input_path=f"{web.url}/rows.jsonl?sig=not/for-all", max_refused_share=0.5)
        (source,) = sources_of(config)
        made = run(source, work=Seventh(), max_refused_share=0.5)
        place = f"{web.url}/rows.jsonl:8"
        assert [(each["source"], each["line"]) for each in made.refusals] == [("rows.jsonl", 8)]
        with pytest.raises(DataError) as caught:
            run(source, work=Seventh(), name="again")
        assert (
            caught.value.where == place
            and f"curl -sL {web.url}/rows.jsonl | sed -n 8p   # the row" in caught.value.hints
        )
        written = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert len(written) > 3 and not [path for path in written if b"not/for-all" in path.read_bytes()]

    @pytest.mark.parametrize("path", ["rows.jsonl", "rows"])
    @pytest.mark.parametrize("status", [401, 403])
    def test_a_web_server_that_refuses_is_not_asked_again(self, web: WebServer, run: Run, path: str, status: int):
        source = files(f"{web.url}/rows.jsonl")
        web.status = status
        with pytest.raises(DataError, match="does not let this user read") as caught:
            files(f"{web.url}/{path}")
        assert not any("AWS" in hint for hint in caught.value.hints)
        with pytest.raises(DataError, match="does not let this user read"):
            run(source)

    @pytest.mark.parametrize("path", ["rows.jsonl", "rows"])
    def test_a_file_that_a_web_server_has_no_more_is_wrong(self, web: WebServer, path: str):
        web.status = 410
        with pytest.raises(DataError, match="no JSON Lines data"):
            files(f"{web.url}/{path}")

    @pytest.mark.parametrize(
        "refusal", [PermissionError("Access Denied"), type("NoCredentialsError", (Exception,), {})()]
    )
    def test_a_server_that_wants_to_know_who_asks_is_not_asked_again(self, refusal: Exception):
        told = unreachable("s3://bucket/rows.jsonl", "input_path", refusal)
        assert isinstance(told, DataError) and "does not let this user read" in told.what


class TestHub:
    @pytest.mark.parametrize("write", [write_lines, as_saved])
    def test_all_that_a_data_set_needs_to_be_read_is_fetched(
        self, write: Callable[..., Any], run: Run, tmp_path: Path, monkeypatch
    ):
        import huggingface_hub
        from huggingface_hub.utils import filter_repo_objects

        hub, here = tmp_path / "hub", tmp_path / "here"
        write(hub / "data.jsonl" if write is write_lines else hub, ROWS)
        (hub / "video.mp4").write_text("large")

        def download(name: str, *, allow_patterns: list[str], **_: Any) -> str:
            here.mkdir()
            for file in filter_repo_objects([path.name for path in hub.iterdir()], allow_patterns=allow_patterns):
                (here / file).write_bytes((hub / file).read_bytes())
            return str(here)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        assert run(files("hf://a/b")).rows() == ROWS
        assert not (here / "video.mp4").exists()

    @pytest.mark.parametrize(
        ("name", "revision", "there"),
        [("hf://a/b@v1/data", "v1", True), ("a/b", None, True), ("hf://a/b/no", None, False)],
    )
    def test_what_is_fetched_is_of_the_revision_and_the_folder_that_was_named(
        self, name: str, revision: str | None, there: bool, tmp_path: Path, monkeypatch
    ):
        import huggingface_hub

        asked: list[Any] = []

        def download(repository: str, **given: Any) -> str:
            asked.append((repository, given["repo_type"], given["revision"], given["allow_patterns"]))
            return str(tmp_path)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        write_lines(tmp_path / "data" / "a.jsonl", ROWS[:1])
        if there:
            assert files(name).files[0].path == str(tmp_path / "data" / "a.jsonl")
        else:
            with pytest.raises(DataError, match="the data set has no 'no'") as caught:
                files(name)
            assert caught.value.found == "data"
        ((repository, kind, wanted, patterns),) = asked
        assert (repository, kind, wanted) == ("a/b", "dataset", revision)
        file = name.removeprefix("hf://").partition("/")[2].partition("/")[2]
        assert ("*.parquet" in patterns) is (not file) and ("*.arrow" in patterns) is (not file)
        assert not file or {file, f"{file}/*.jsonl", f"{file}/*.parquet"} <= set(patterns)

    @pytest.mark.parametrize(
        ("path", "name"),
        [
            ("hf://nvidia/Blend", HubName("nvidia/Blend")),
            ("hf://datasets/nvidia/Blend/rlvr1.jsonl", HubName("nvidia/Blend", None, "rlvr1.jsonl")),
            ("hf://nvidia/Blend@v1/data/a.parquet", HubName("nvidia/Blend", "v1", "data/a.parquet")),
            ("nvidia/Blend", HubName("nvidia/Blend")),
            ("data/rows.jsonl", None),
            ("./nvidia/Blend", None),
            ("s3://bucket/rows.jsonl", None),
            ("/a/b", None),
            ("a/b/c", None),
        ],
    )
    def test_names(self, path: str, name: HubName | None):
        assert hub_name(path) == name

    def test_a_mirror_goes_before_the_hub(self, run: Run, tmp_path: Path):
        write_lines(tmp_path / "mirror" / "nvidia" / "Blend" / "train.jsonl", ROWS)
        assert run(files("hf://nvidia/Blend", split="train", mirror=str(tmp_path / "mirror"))).rows() == ROWS
        for file in ("", "/rlvr1.jsonl"):
            with pytest.raises(DataError, match="the mirror has no copy of the data set nvidia/Other") as caught:
                files(f"hf://nvidia/Other{file}", mirror=str(tmp_path / "mirror"))
            assert caught.value.expected == f"{tmp_path}/mirror/nvidia/Other{file}"
            # A folder of the file's own name would hold the whole data set, and all of it be taken for the file.
            fetched = f"hf download nvidia/Other --repo-type dataset --local-dir {tmp_path}/mirror/nvidia/Other"
            assert caught.value.hints[0] == fetched

    def test_a_hub_that_does_not_answer_may_be_tried_again(self, tmp_path: Path):
        told = from_hub("http://127.0.0.1:9", tmp_path, "hf://nvidia/Blend")
        assert told["code"] == RetryableError.code
        assert "the hub does not answer" in told["what"] and told["where"] == "input_path = nvidia/Blend"
        assert told["hints"][0].startswith("mirror=FOLDER")

    def test_data_files_are_fetched_by_name(self, hub: str, tmp_path: Path):
        told = from_hub(hub, tmp_path, "hf://nvidia/Blend/rlvr1.jsonl")
        assert told["files"] == ["rlvr1.jsonl"] and told["rows"] == len(ROWS)

    def test_a_name_that_the_hub_has_not_is_wrong(self, hub: str, tmp_path: Path):
        told = from_hub(hub, tmp_path, "nvidia/Nothing")
        assert told["code"] == DataError.code and "the hub has no such data set" in told["what"]


def from_hub(endpoint: str, folder: Path, path: str) -> dict[str, Any]:
    """What becomes of a hub name, in a process of its own: the library reads its settings once."""
    program = (
        "import json, sys\n"
        "from nemotron_steps.errors import StepsError\n"
        "from nemotron_steps.steps.data_prep.blends.sources import data_files\n"
        "try:\n"
        "    files = data_files(sys.argv[1], key='input_path')\n"
        "    rows = sum(len(open(file.path).readlines()) for file in files)\n"
        "    told = {'files': [file.name for file in files], 'rows': rows}\n"
        "except StepsError as error:\n"
        "    told = {'code': error.code, 'what': error.what, 'where': error.where, 'hints': error.hints}\n"
        "print(json.dumps(told))\n"
    )
    environment = {"HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "hf"), "PATH": "/usr/bin", "HOME": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", program, path], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@dataclass
class WebServer:
    """Says `status` to whatever is asked; 200 with the rows. Knows no ranges."""

    url: str = ""
    status: int = 200
    asked: list[str] = field(default_factory=list)


@pytest.fixture
def web() -> Iterator[WebServer]:
    told = WebServer()
    text = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    contents = {"/list": json.dumps(ROWS).encode(), "/packed": gzip.compress(text)}

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            told.asked.append(self.command)
            body = contents.get(self.path.partition("?")[0], text) if told.status == 200 else b""
            self.send_response(told.status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    told.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield told
    server.shutdown()
    server.server_close()


@pytest.fixture
def hub() -> Iterator[str]:
    """A hub with one data set, which has two files of rows and a readme."""
    text = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    names = ("README.md", "rlvr1.jsonl", "rlvr2.jsonl")
    commit = "0123456789abcdef0123456789abcdef01234567"

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path.startswith("/api/datasets/nvidia/Blend/revision/"):
                siblings = [{"rfilename": name, "size": len(text)} for name in names]
                body = json.dumps({"_id": "1", "id": "nvidia/Blend", "sha": commit, "siblings": siblings}).encode()
            elif path.startswith("/api/datasets/nvidia/Blend/tree/"):
                body = json.dumps([{"type": "file", "path": n, "size": len(text), "oid": n} for n in names]).encode()
            elif path.startswith("/datasets/nvidia/Blend/resolve/") and path.endswith("rlvr1.jsonl"):
                body = text
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", '"0123"')
            self.send_header("X-Repo-Commit", commit)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
