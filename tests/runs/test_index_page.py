"""The page of every run and artifact: what it links and what it escapes."""

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from nemotron_steps.artifacts.imports import Imports
from nemotron_steps.artifacts.models import Artifact, FileRecord, Producer
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.runs.report.page import render_index, write_index
from nemotron_steps.runs.run_folder import RunFolder, RunInfo

HOSTILE = '<img src=x onerror="document.title=1">&"\'</td></script><script>document.title=2</script>'


class Page(HTMLParser):
    """Tags and links of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]


@pytest.fixture
def home(tmp_path: Path) -> ArtifactStore:
    store = ArtifactStore(tmp_path / "a home: with spaces")
    for name, status in (("first", "done"), ("second", "failed")):
        folder = RunFolder(store, f"{name}-run")
        folder.create(f"toy/{name}", {"targets": [f"toy/{name}"], "config": "tiny"})
        (folder.path / "report.html").write_text("report")
        info = folder.load()
        assert info is not None
        folder.update(info, status=status, steps={name: {"state": "ran"}})
    data = tmp_path / "data.jsonl"
    data.write_text('{"x": 1}\n')
    store.add(data, type_name="training_jsonl", name="rows")
    return store


@pytest.mark.parametrize("place", ["home", "elsewhere"])
def test_every_link_leads_to_a_report_or_an_artifact(home, tmp_path, place):
    path = write_index(home, None if place == "home" else tmp_path / "pages" / "runs.html")
    assert path.is_file() and (place == "elsewhere" or path == home.backend.scratch / "index.html")
    text = path.read_text()
    links = [link for link in Page(text).links if not link.startswith("#")]
    found = {(path.parent / unquote(link)).resolve() for link in links}
    assert {each.relative_to(home.backend.scratch.resolve()).parts[0] for each in found} == {"runs", "artifacts"}
    assert len(found) == 3 and all(each.exists() for each in found)
    assert "toy/first -c tiny" in text and "rows:v1" in text and "1 ran" in text


def test_a_record_of_a_folder_that_this_user_never_supplied_is_no_link(home, tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "train.jsonl").write_text('{"x": 2}\n')
    home.reference(tmp_path / "outside", name="theirs")
    assert [link for link in Page(write_index(home).read_text()).links if link.endswith("outside")]
    # Somebody else's look at the same home.
    other = ArtifactStore(home.backend.url)
    other.imports = Imports(tmp_path / "notes of another user")
    text = write_index(other).read_text()
    assert "theirs:v1" in text and not [link for link in Page(text).links if "outside" in link]


def test_what_runs_and_users_wrote_is_text(tmp_path):
    run = RunInfo("r", HOSTILE, HOSTILE, {"targets": [HOSTILE]}, {"s": {"state": HOSTILE}}, error={"what": HOSTILE})
    producer = Producer(HOSTILE, "port", HOSTILE)
    artifact = Artifact(HOSTILE, "d", tmp_path, {}, (FileRecord("f", 1, "s"),), HOSTILE, 1, producer, source=HOSTILE)
    tame = Artifact("t", "d", tmp_path, name="n", version=1)
    plain = Page(render_index("home", [RunInfo("r")], [tame], tmp_path, tmp_path))
    page = Page(render_index(HOSTILE, [run], [artifact], tmp_path, tmp_path))
    assert "img" not in page.tags and page.tags.count("script") == plain.tags.count("script") == 1
    assert all(link.startswith(("#", "./")) for link in page.links)
