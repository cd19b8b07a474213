"""`steps artifacts diff A B`."""

from __future__ import annotations

from tests.artifacts.checkpoint_files import write_hf, write_safetensors


def test_two_productions_show_the_config_the_rows_and_the_lineage_that_differ(cli, workplace):
    assert cli("run", "toy_all").code == 0
    assert cli("run", "toy_all", "make.count=2", "train.optimizer.lr=0.5").code == 0
    rows = cli("artifacts", "diff", "toy/make/rows:v1", "toy/make/rows:v2")
    assert rows.code == 1
    assert "rows of train.jsonl: 0 added, 2 removed, 0 changed, 2 the same" in rows.out
    assert "count" in rows.out and "4 → 2" in rows.out and 'removed line 3  {"number": 2}' in rows.out
    found = cli("artifacts", "diff", "toy/train/model:v1", "toy/train/model:v2", "--json").json
    assert found["config"] == {"optimizer.lr": [0.1, 0.5]}
    assert found["inputs"] == {"rows": ["toy/make/rows:v1", "toy/make/rows:v2"]}
    assert found["ancestors"] == {"only_a": ["toy/make/rows:v1"], "only_b": ["toy/make/rows:v2"]}
    assert list(found["files"]) == ["model.json"] and found["same"] is False


def test_the_same_contents_are_the_same_wherever_they_come_from(cli, workplace):
    assert cli("run", "toy/train", "-c", "tiny").code == 0
    assert cli("run", "toy/train", "-c", "tiny", "steps=4").code == 0  # another production of the same bytes
    same = cli("artifacts", "diff", "toy/train/model:v1", "toy/train/model:v2")
    assert same.code == 0 and "the same" in same.out and "3 → 4" in same.out
    assert cli("artifacts", "diff", "toy/train/model:v1", "toy/train/model:v1", "--json").json["same"] is True


def test_checkpoints_show_the_tensor_that_differs_most(cli, workplace):
    for name, values in (("one", [1.0, 2.0]), ("two", [1.0, 2.5])):
        folder = write_hf(workplace / name)
        write_safetensors(folder / "model.safetensors", {"a": values, "b": [3.0]})
        assert cli("artifacts", "add", str(folder), "--name", name).code == 0
    found = cli("artifacts", "diff", "one", "two")
    assert found.code == 1 and "tensors: 1 differ, 1 the same, largest difference 0.5 in a" in found.out


def test_a_file_that_one_of_them_lacks_and_a_row_that_changed_are_shown_on_their_side(cli, workplace):
    for name, rows in (("one", ['{"id": 1, "x": 1}', '{"id": 2}']), ("two", ['{"id": 2}', '{"id": 1, "x": 2}'])):
        (workplace / name).mkdir()
        (workplace / name / "train.jsonl").write_text("\n".join(rows) + "\n")
    (workplace / "two" / "validation.jsonl").write_text('{"id": 3}\n')
    for name in ("one", "two"):
        assert cli("artifacts", "add", name, "--type", "training_jsonl", "--name", name).code == 0
    there, back = cli("artifacts", "diff", "one", "two"), cli("artifacts", "diff", "two", "one")
    assert (there.code, back.code) == (1, 1)
    assert "validation.jsonl  — → 10 B" in there.out and "validation.jsonl  10 B → —" in back.out
