"""One data set in every form it may have: the same rows come out, and what is wrong with one is told once."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from huggingface_hub import constants

from nemotron_steps.config.schema.data_prep import DataPrepConfig
from nemotron_steps.errors import DataError, RetryableError, show_line
from nemotron_steps.steps.data_prep.blends import formats
from nemotron_steps.steps.data_prep.blends.prepare import Source, sources_of
from nemotron_steps.steps.data_prep.blends.shards import RowFunction
from nemotron_steps.steps.data_prep.blends.sources import HubName, data_files, hub_name
from tests.steps.data_prep.blends.conftest import Run, write_lines


@pytest.mark.parametrize(
    ("name", "start", "kind"),
    [
        ("rows", b" \n[1]", "list"),
        ("rows.jsonl", b"[", "jsonl"),
        ("rows.TSV", b"[", "csv"),
        ("rows.json", b"\x1f\x8b", "gzip"),
        ("rows", b"PAR1", "parquet"),
    ],
)
def test_a_file_of_any_name_is_known_by_its_first_bytes(name: str, start: bytes, kind: str, tmp_path: Path):
    (tmp_path / name).write_bytes(start)
    assert [file.kind for file in data_files(str(tmp_path / name), key="")] == [kind]


ROWS = [{"n": i, "text": "é" * (i % 3), "list": [{"a": i}], "none": None, "real": i / 7} for i in range(50)]


@dataclass(frozen=True)
class Seventh:
    """Refuses row 7."""

    def __call__(self) -> RowFunction:
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


@pytest.mark.parametrize("address", ["file://{folder}/rows.jsonl", "file://{folder}", "memory://prep/rows.jsonl"])
def test_any_address_that_fsspec_opens_is_a_source(address: str, run: Run, tmp_path: Path, monkeypatch):
    import fsspec

    monkeypatch.setattr(formats, "PART_BYTES", 64)
    folder = tmp_path / "in"
    text = write_lines(folder / "rows.jsonl", ROWS).read_bytes()
    with fsspec.open("memory://prep/rows.jsonl", "wb") as file:
        file.write(text)
    assert run(files(address.format(folder=folder))).rows() == ROWS


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
        assert caught.value.hints[:1] == ('"split": null   # in the blend file: every file that `found` names',)


class TestDamage:
    @pytest.mark.parametrize(("name", "text", "what"), [("a.json", "[{", "list"), ("a.csv", 'a\n"', "table")])
    def test_a_table_and_a_list_that_cannot_be_read_are_named(
        self, name: str, text: str, what: str, run: Run, tmp_path: Path
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(DataError, match=f"the {what} cannot be read"):
            run(files(str(tmp_path / name)))

    def test_a_cut_off_gzip_file_names_it(self, run: Run, tmp_path: Path):
        path = tmp_path / "rows.jsonl.gz"
        as_gzip(path, ROWS)
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(DataError, match="damaged or cut off") as caught:
            run(files(str(path)))
        assert caught.value.where == str(path)

    def test_a_parquet_file_that_is_none_names_it(self, run: Run, tmp_path: Path):
        pytest.importorskip("pyarrow")
        (tmp_path / "rows.parquet").write_bytes(b"PAR1 but no more")
        with pytest.raises(DataError, match="damaged, or of another format"):
            run(files(str(tmp_path / "rows.parquet")))


class TestAddresses:
    def test_a_server_that_does_not_answer_may_be_tried_again(self):
        with pytest.raises(RetryableError, match="could not be fetched") as caught:
            files("http://127.0.0.1:9/rows.jsonl")
        assert caught.value.where == "input_path = http://127.0.0.1:9/rows.jsonl"

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


class TestHub:
    @pytest.mark.parametrize(
        ("path", "name"),
        [
            ("hf://nvidia/Blend", HubName("nvidia/Blend")),
            ("hf://datasets/nvidia/Blend/rlvr1.jsonl", HubName("nvidia/Blend", None, "rlvr1.jsonl")),
            ("hf://nvidia/Blend@v1/data/a.parquet", HubName("nvidia/Blend", "v1", "data/a.parquet")),
            ("nvidia/Blend", HubName("nvidia/Blend")),
            ("data/rows.jsonl", None),
            ("s3://bucket/rows.jsonl", None),
        ],
    )
    def test_names(self, path: str, name: HubName | None):
        assert hub_name(path) == name

    def test_the_licences_of_sources_are_recorded(self, run: Run, tmp_path: Path, hub: Path):
        mirror, nothing = tmp_path / "mirror", tmp_path / "nothing"
        folders = {"hf://org/Name/data": hub, str(tmp_path / "own"): tmp_path / "own", "org/Copy": mirror / "org/Copy"}
        for number, folder in enumerate(folders.values()):
            write_lines(folder / "data" / "train.jsonl", ROWS[number : number + 1])
            (folder / "README.md").write_text(f"---\nlicense: licence-{number}\n---\n")
        write_lines(nothing / "train.jsonl", ROWS[9:])
        given = []
        for number, path in enumerate([*folders, str(nothing)]):
            config = DataPrepConfig(input_path=path, mirror=str(mirror) if path == "org/Copy" else None)
            given += sources_of(config)
            assert given[-1].licence == (f"licence-{number}" if number < 3 else "")
        assert run(*given[:2], given[0], given[3]).licence == "licence-0, licence-1, not recorded"
        assert run(given[3], name="unsaid").licence is None

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


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that a stand-in for the hub serves as the data set org/Name."""
    root = tmp_path / "served"

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            paths = [each.relative_to(root).as_posix() for each in root.rglob("*.*")]
            told: Any = {"id": "org/Name", "sha": "0a" * 20, "siblings": [{"rfilename": path} for path in paths]}
            if "/tree/" in self.path:
                told = [{"type": "file", "path": path, "oid": path, "size": 1} for path in paths]
            is_file = "/resolve/" in self.path
            body = (root / self.path.split("0a/")[-1]).read_bytes() if is_file else json.dumps(told).encode()
            self.send_response(200)
            headers = {"Content-Length": len(body), "ETag": f"etag-{hash(body)}", "X-Repo-Commit": "0a" * 20}
            for name, value in headers.items():
                self.send_header(name, str(value))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        changed = {"ENDPOINT": address, "HF_HUB_OFFLINE": False, "HF_HUB_CACHE": str(tmp_path)}
        changed["HUGGINGFACE_CO_URL_TEMPLATE"] = address + "/{repo_id}/resolve/{revision}/{filename}"
        for name, value in changed.items():
            monkeypatch.setattr(constants, name, value)
        yield root
        server.shutdown()


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
