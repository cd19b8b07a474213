"""`${art:…}` in a config: which artifact it names, and what of the `run` table is left when all are read."""

import pytest

from nemotron_steps.config.compose import Reference, compose, read_reference


@pytest.mark.parametrize(
    ("written", "ref", "field"),
    [
        ("rows", "rows:latest", "path"),
        ("a/b.c-d,val", "a/b.c-d:latest", "val"),
        ("data,train", "super3/data:v7", "train"),
        ("plain", "mine:latest", "path"),
        ("number", "number:latest", "path"),  # which is no name
        ("0123456789abcdef" * 4, "0123456789abcdef" * 4, "path"),
        ("abcdef0", "abcdef0:latest", "path"),  # too short for a digest
    ],
)
def test_a_reference_names_a_version_or_a_digest_or_means_the_latest(configs, written, ref, field):
    text = f"run: {{data: 'super3/data:v7', plain: mine, number: 7}}\nat: '${{art:{written}}}'\n"
    found = compose(None, search=configs({"rl/toy/default.yaml": text})).values["at"]
    assert read_reference(found) == Reference(ref, field)


def test_names_that_references_use_are_no_keys_and_others_are(configs):
    run = "run: {data: a, more: b, env: c}\n"
    used = "one: '${art:data,train}'\nlist: [{two: '${art: more }'}]\n"
    search = configs({"rl/toy/default.yaml": run + used, "rl/toy/all.yaml": f"{run}{used}three: '${{art:env}}'\n"})
    assert compose(None, search=search).values["run"] == {"env": "c"}
    assert "run" not in compose("all", search=search).values
    assert compose(None, ["run=null"], search=search).values["run"] is None
