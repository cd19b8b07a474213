"""`steps index`."""

from __future__ import annotations


def test_the_page_is_written_and_named(cli, workplace):
    assert cli("run", "toy/make").code == 0
    assert cli("index").out == "home/index.html\n"
    assert "toy/make/rows:v1" in (workplace / "home" / "index.html").read_text()
    made = cli("index", "--out", "pages/all.html", "--json").json
    assert made == {"index": "pages/all.html"} and (workplace / "pages" / "all.html").is_file()


def test_a_place_that_cannot_be_written_is_a_storage_error(cli, workplace):
    (workplace / "file").write_text("")
    wrong = cli("index", "--out", "file/all.html")
    assert wrong.code == 1 and "error[E610]" in wrong.err and "Traceback" not in wrong.err
