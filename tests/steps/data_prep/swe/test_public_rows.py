"""Where the fields of a public row are looked for, and which of two goes before the other."""

from __future__ import annotations

import json

import pytest

from nemotron_steps.errors import DataError
from nemotron_steps.steps.data_prep.swe_tasks import complete


@pytest.mark.parametrize("as_text", [False, True])
def test_a_field_at_the_top_goes_before_the_instances_and_that_before_the_metadatas(as_text: bool) -> None:
    instance = {"repo": "instance", "patch": "instance"}
    metadata = {"repo": "metadata", "patch": "metadata", "base_commit": "metadata"}
    row = {
        "repo": "top",
        "instance_dict": json.dumps(instance) if as_text else instance,
        "responses_create_params": {"metadata": metadata, "input": "asked"},
    }
    done = complete(row, "f:1")
    assert (done["repo"], done["patch"], done["base_commit"]) == ("top", "instance", "metadata")
    assert done["responses_create_params"]["input"] == "asked" and done["agent_ref"]["name"] == "swe_agent"


def test_an_instance_that_is_no_object_is_named() -> None:
    with pytest.raises(DataError, match="`instance_dict` must be an object") as caught:
        complete({"instance_dict": "[1]"}, "f:1")
    assert caught.value.where == "f:1 field instance_dict"
