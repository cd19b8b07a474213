"""`steps artifacts`: what each command prints, for people and as JSON."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from nemotron_steps.artifacts.models import Artifact, Edge, FileRecord, Producer, tree_digest
from nemotron_steps.artifacts.records import artifact_bytes
from nemotron_steps.artifacts.store import ArtifactStore
from tests.cli.conftest import Cli


def test_what_is_added_is_said_shown_and_listed_with_where_it_came_from(cli: Cli, workplace: Path) -> None:
    data = workplace / "data"
    data.mkdir()
    for number in range(23):
        (data / f"{number:02d}.jsonl").write_text('{"x": 1}\n')
    added = cli("artifacts", "add", str(data), "--name", "mine")
    assert added.code == 0 and "--input PORT=mine:v1" in added.out
    again = cli("artifacts", "add", str(data), "--name", "mine", "--json").json
    assert (again["ref"], len(again["files"])) == ("mine:v1", 23)
    shown = cli("artifacts", "show", "mine").out
    assert f"added from {data}" in shown and again["digest"] in shown
    assert "19.jsonl" in shown and "20.jsonl" not in shown and "… 3 more" in shown
    assert cli("artifacts", "show", "mine", "--json").json == again
    (listed,) = cli("artifacts", "list", "--json").json
    assert listed == again
    assert "added from" in cli("artifacts", "list").out


def test_lineage_as_json_has_every_link_and_those_made_from_it_are_listed(cli: Cli) -> None:
    cli("run", "toy/train", "toy/score", "-c", "tiny")
    above = cli("artifacts", "lineage", "toy/score/score", "--json").json
    assert above["artifact"] == "toy/score/score:v1" and above["descendants"] == []
    assert {"toy/make/rows:v1", "toy/train/model:v1"} <= {link["parent"] for link in above["ancestors"]}
    drawn = cli("artifacts", "lineage", "toy/make/rows").out.splitlines()
    below = drawn[drawn.index("used by") + 1 :]
    assert [line.split()[-1] for line in below if line] == ["toy/train/model:v1"]


def test_what_two_branches_come_from_is_drawn_below_the_first_of_them(cli: Cli, workplace: Path) -> None:
    store = ArtifactStore(workplace / "home")
    for name, parents in (("root", ""), ("a", ["root"]), ("b", ["a"]), ("c", ["a", "root"]), ("d", ["b", "c"])):
        with store.staging() as folder:
            (folder / "tree").mkdir()
            (folder / "tree" / "train.jsonl").write_text(json.dumps({"name": name}) + "\n")
            edges = [Edge("in", store.find(parent).digest, store.find(parent).ref) for parent in parents]
            made_by = Producer(name, "out", "r")
            store.commit(folder / "tree", "training_jsonl", name=name, inputs=edges, producer=made_by)
    assert cli("artifacts", "lineage", "d").out.splitlines()[1:] == [
        "├── b:v1  in of d",
        "│   └── a:v1  in of b",
        "│       └── root:v1  in of a",
        "└── c:v1  in of d",
        "    ├── a:v1  in of c, see above",
        "    └── root:v1  in of c",
    ]


def test_artifacts_are_listed_by_name_and_by_what_they_can_be_used_as(cli: Cli) -> None:
    cli("run", "toy/train", "-c", "tiny")
    cli("run", "toy/make", "count=2")

    def listed(*flags: str) -> list[str]:
        return [artifact["ref"] for artifact in cli("artifacts", "list", *flags, "--json").json]

    assert listed("--name", "toy/make/rows") == ["toy/make/rows:v1", "toy/make/rows:v2"]
    assert listed("--name", "toy/make") == [] and listed("--type", "toy_model") == ["toy/train/model:v1"]
    assert listed("--type", "toy_data", "--name", "toy/train/model") == []
    lines = {line.split()[0]: line for line in cli("artifacts", "list").out.splitlines()}
    assert "toy/make (run " in lines["toy/make/rows:v2"] and "28 B" in lines["toy/make/rows:v2"]


def test_what_is_added_as_a_packs_own_type_is_looked_at_as_what_that_is(cli: Cli, workplace: Path) -> None:
    (workplace / "manifests").mkdir()
    (workplace / "manifests" / "types.toml").write_text('[my_rows]\ndescription = "x"\nis_a = ["training_jsonl"]\n')
    (workplace / "rows.jsonl").write_text("no JSON\n")
    assert cli("artifacts", "add", "rows.jsonl", "--type", "my_rows").code == 2
    (workplace / "rows.jsonl").write_text('{"a": 1}\n')
    assert cli("artifacts", "add", "rows.jsonl", "--type", "my_rows").code == 0


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_record_of_a_folder_that_this_user_never_supplied_is_not_shown_with_it(
    cli: Cli, workplace: Path, flags: tuple[str, ...]
) -> None:
    (workplace / "outside").mkdir()
    content = b'{"x": 1}\n'
    (workplace / "outside" / "train.jsonl").write_bytes(content)
    forge(workplace, str(workplace / "outside"), content)
    shown = cli("artifacts", "show", "forged", *flags)
    verified = cli("artifacts", "verify", "forged", *flags)
    assert shown.code == verified.code == 2
    for result in (shown, verified):
        assert "never gave as an input" in result.out + result.err and "made by" not in result.out
    for command in ("list", "lineage"):
        listed = cli("artifacts", command, *(("forged",) if command == "lineage" else ()), *flags)
        assert listed.code == 0 and str(workplace / "outside") not in listed.out


def forge(workplace: Path, location: str, content: bytes) -> None:
    """Records by which rows of any folder are an artifact, as whoever can write to a shared home may write them."""
    file = FileRecord("train.jsonl", len(content), hashlib.sha256(content).hexdigest())
    made = Artifact(
        "training_jsonl",
        tree_digest("training_jsonl", [file]),
        Path(location),
        files=(file,),
        name="forged",
        created=1.0,
    )
    made = replace(made, location=location)
    artifacts = workplace / "home" / "artifacts"
    for path, record in (
        (artifacts / "references" / f"{made.digest}.json", made),
        (artifacts / "names" / "forged" / "v1.json", replace(made, version=1)),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(artifact_bytes(record))
