"""What needs several processes is refused in one, each setting by its key, with what would do without."""

from types import SimpleNamespace

import pytest

from nemotron_steps.config.layout.constraints import raise_if_ray_needed
from nemotron_steps.config.schema.policy import PolicyConfig
from nemotron_steps.config.schema.rl import ClusterConfig
from nemotron_steps.errors import UnsupportedError

MEGATRON = "policy.megatron_cfg"


def refused(cluster: dict[str, object], megatron: dict[str, int]) -> None:
    policy = PolicyConfig.model_validate({"checkpoint": "m", "megatron_cfg": megatron})
    asked = ClusterConfig.model_validate({"backend": "process", **cluster})
    raise_if_ray_needed(SimpleNamespace(cluster=asked, policy=policy))


@pytest.mark.parametrize(
    ("cluster", "megatron", "without"),
    [
        ({"policy_workers": 2}, {}, "cluster.policy_workers=1"),
        ({"ray_address": "auto"}, {}, "cluster.ray_address=null"),
        *(({}, {f"{name}_parallel_size": 2}, f"{MEGATRON}.{name}_parallel_size=1")
          for name in ("tensor_model", "pipeline_model", "context", "expert_model")),
    ],
)  # fmt: skip
def test_one_process_refuses_what_needs_more_and_says_how_to_do_without(cluster, megatron, without):
    with pytest.raises(UnsupportedError) as caught:
        refused(cluster, megatron)
    assert caught.value.hints == ("cluster.backend=ray", without)
    assert caught.value.where == without.partition("=")[0]
    refused(dict.fromkeys(cluster, None if "ray_address" in cluster else 1), dict.fromkeys(megatron, 1))
    if cluster:
        refused({**cluster, "backend": "ray"}, megatron)
