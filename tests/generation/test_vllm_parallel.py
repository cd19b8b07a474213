"""A real vLLM engine of two tensor-parallel workers: each fetches the weights itself and keeps its shard."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch

from nemotron_steps.config.schema.policy import VllmConfig
from nemotron_steps.engine.placement.rendezvous import serve_store
from nemotron_steps.engine.types import GenerationRequest, SamplingParams
from nemotron_steps.engine.weight_sync.offers import STREAM, OfferedWeights, ReceivingOffer
from nemotron_steps.engine.weight_sync.plan import WeightPlan
from nemotron_steps.engine.weight_sync.streams import StreamSender
from nemotron_steps.errors import WorkerLostError
from tests.generation.test_vllm import PROMPTS, model, sample, token_mult_prob_error  # noqa: F401

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def generator(model):  # noqa: F811
    from nemotron_steps.engine.generation.vllm import VllmGenerator

    folder, network = model
    generator = VllmGenerator(
        folder,
        VllmConfig(tensor_parallel_size=2, enforce_eager=True, max_num_seqs=32),
        max_total_length=64,
        precision="float32",
        weights=network.state_dict().items(),
    )
    yield generator
    generator.close()


def change(network):
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)


def test_the_workers_follow_the_policy_through_shared_memory(generator, model):  # noqa: F811
    _, network = model
    assert token_mult_prob_error(network, PROMPTS, sample(generator, PROMPTS, "v0")) < 1.0001
    for version in range(1, 6):
        change(network)
        report = generator.update_weights(network.state_dict().items(), version)
        assert report.bytes == 2 * sum(tensor.nbytes for tensor in network.state_dict().values())
        if version in (1, 5):  # the same prompts: their prefixes must not be read from the cache
            completions = sample(generator, PROMPTS, f"v{version}")
            assert {v for c in completions for v in c.weight_versions} == {version}
            assert token_mult_prob_error(network, PROMPTS, completions) < 1.0001


def test_each_worker_is_a_rank_of_the_senders_broadcast(generator, model):  # noqa: F811
    """As weights come from another machine, or by NCCL: one sender, one rank a tensor-parallel worker."""
    _, network = model
    served, port = serve_store("127.0.0.1")
    names = ["generator 0/0", "generator 0/1"]
    plan = WeightPlan.of(network.state_dict().items(), 20_000)
    sender = StreamSender(plan, served, "rank 0", ipc=[], broadcast=names, device=torch.device("cpu"))
    offers = [
        ReceivingOffer(STREAM, sender.offer(), ("127.0.0.1", port), name, (1 + rank, 3))
        for rank, name in enumerate(names)
    ]
    offered = OfferedWeights("gloo", tuple(offers))
    generator.take_up(offered)
    for version in (6, 7):
        change(network)
        sending = threading.Thread(target=sender.send, args=(iter(network.state_dict().items()),))
        sending.start()
        generator.update_weights(offered, version)
        sending.join(30)
        assert token_mult_prob_error(network, PROMPTS, sample(generator, PROMPTS, f"v{version}")) < 1.0001


def test_a_dead_worker_is_named_and_takes_the_others_with_it(generator, model):  # noqa: F811
    """Last in this file: nothing can be sampled afterwards."""
    workers = [worker.proc for worker in generator._engine.model_executor.workers]
    generator.submit(GenerationRequest("lost", PROMPTS[0], SamplingParams(max_new_tokens=40), 4))
    generator.step()
    os.kill(workers[1].pid, signal.SIGKILL)
    with pytest.raises(WorkerLostError, match="tensor-parallel worker 1") as caught:
        while True:
            generator.step()
    assert str(workers[1].pid) in caught.value.where and "-9" in caught.value.found
    with pytest.raises(WorkerLostError, match="tensor-parallel worker 1"):
        generator.update_weights(model[1].state_dict().items(), 8)
    generator.close()
    workers[0].join(20)
    assert workers[0].exitcode is not None
