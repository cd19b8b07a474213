"""A real vLLM engine of two tensor-parallel workers: each fetches the weights itself and keeps its shard.

The model is a mixture of experts, whose reloading is a matter of its own (vllm_worker.py).
"""

import os
import signal
import threading
from dataclasses import replace

import pytest
import torch

from nemotron_steps.engine.generation.vllm import transfer as vllm_transfer
from nemotron_steps.engine.weight_sync.transfer import ChannelHandles, StreamSender, WeightPlan
from nemotron_steps.engine.workers.workers import serve_store
from nemotron_steps.errors import WorkerLostError
from tests.engine.generation.vllm.conftest import PROMPTS, SIZES, sample, shift, started, token_mult_prob_error

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    experts = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
    network = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts, initializer_range=0.1))  # experts that matter
    folder = tmp_path_factory.mktemp("qwen3_moe")
    network.save_pretrained(folder)
    return folder, network


@pytest.fixture(scope="module")
def generator(model):
    generator = started(model[0], weights_of(model[1]), tensor_parallel_size=2)
    yield generator
    generator.close()


def weights_of(network):
    """Under the names of checkpoints, one expert at a time: transformers keeps them in two tensors a layer."""
    for name, tensor in network.state_dict().items():
        if ".mlp.experts." not in name:
            yield name, tensor
            continue
        prefix, kind = name.rsplit(".", 1)
        for expert, whole in enumerate(tensor):
            parts = {"gate_proj": whole[:64], "up_proj": whole[64:]} if kind == "gate_up_proj" else {kind: whole}
            for part, weight in parts.items():
                yield f"{prefix}.{expert}.{part}.weight", weight


def test_the_workers_follow_the_policy(generator, model):
    _, network = model
    assert token_mult_prob_error(network, PROMPTS, sample(generator, PROMPTS, "v0")) < 1.0001
    for version in range(1, 6):
        shift(network, 0.02)
        report = generator.update_weights(weights_of(network), version)
        assert report.bytes == 2 * sum(tensor.nbytes for _, tensor in weights_of(network))
        if version in (1, 5):  # the same prompts: their prefixes must not be read from the cache
            completions = sample(generator, PROMPTS, f"v{version}")
            assert {v for c in completions for v in c.weight_versions} == {version}
            assert token_mult_prob_error(network, PROMPTS, completions) < 1.0001


def test_each_worker_is_a_rank_of_the_senders_broadcast(generator, model):
    """As weights come from another machine, or by NCCL: one sender, one rank a tensor-parallel worker."""
    _, network = model
    served, port = serve_store("127.0.0.1")
    names = ["generator 0/0", "generator 0/1"]
    plan = WeightPlan.of(weights_of(network), 20_000)
    sender = StreamSender(plan, served, "rank 0", ipc=[], broadcast=names, device=torch.device("cpu"))
    offers = [
        replace(sender.offer(), address=("127.0.0.1", port), name=name, place=(1 + rank, 3))
        for rank, name in enumerate(names)
    ]
    offered = ChannelHandles("gloo", tuple(offers))
    generator.open_channel(offered)
    for version in (6, 7):
        shift(network, 0.02)
        sending = threading.Thread(target=sender.send, args=(weights_of(network),))
        sending.start()
        generator.update_weights(offered, version)
        sending.join(30)
        assert token_mult_prob_error(network, PROMPTS, sample(generator, PROMPTS, f"v{version}")) < 1.0001


def test_a_worker_that_hangs_is_not_waited_for(generator, model, monkeypatch):
    """Nothing can be sampled afterwards."""
    monkeypatch.setattr(vllm_transfer, "LATER_SECONDS", 2.0)
    hanging = generator._engine.model_executor.workers[1].proc.pid
    os.kill(hanging, signal.SIGSTOP)
    try:
        with pytest.raises(WorkerLostError, match="tensor-parallel workers") as caught:
            generator.update_weights(weights_of(model[1]), 8)
    finally:
        os.kill(hanging, signal.SIGKILL)
    assert str(hanging) in caught.value.where and "load_offered" in caught.value.found
