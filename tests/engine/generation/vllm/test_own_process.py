"""vLLM's whole engine in a process of its own: weights by offer, versions of tokens, and how it ends."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from nemotron_steps.engine.types import GenerationRequest, SamplingParams
from nemotron_steps.errors import WorkerLostError
from tests.engine.generation.vllm.conftest import EOS, PROMPTS, finish, sample, shift, started, token_mult_prob_error

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]


def engines() -> list[psutil.Process]:
    """Processes of vLLM under this one."""
    return [p for p in psutil.Process().children(recursive=True) if "resource_tracker" not in " ".join(p.cmdline())]


@pytest.fixture(scope="module")
def generator(model):
    weights, options = model[1].state_dict().items(), {"max_num_batched_tokens": 4096}
    generator = started(model[0], weights, options=options, async_engine=True)
    yield generator
    generator.close()


def test_logprobs_are_the_policys_after_every_update(generator, model):
    _, network = model
    assert engines()
    for version in range(1, 4):
        shift(network, 0.02)
        report = generator.update_weights(network.state_dict().items(), version)
        assert report.bytes == sum(t.numel() * t.element_size() for t in network.state_dict().values())
        completions = sample(generator, PROMPTS, f"v{version}")
        assert token_mult_prob_error(network, PROMPTS, completions) < 1.0001
        assert {v for c in completions for v in c.weight_versions} == {version}


def test_the_version_of_every_token_follows_from_the_length_at_the_update(generator, model):
    _, network = model
    generator.submit(GenerationRequest("long", PROMPTS[0], SamplingParams(max_new_tokens=40), 4))
    done = []
    while generator.sampled_tokens < generator._returned_tokens + 4 * 10:
        done += generator.step()
    before = generator.weight_version
    generator.update_weights(network.state_dict().items(), before + 1)
    done += finish(generator)
    assert len(done) == 4
    for completion in done:
        versions = completion.weight_versions
        assert len(versions) == len(completion.token_ids) and versions == sorted(versions)
    long = [completion for completion in done if len(completion.token_ids) == 40]
    assert long and all(10 <= c.weight_versions.count(before) < 40 for c in long)


ORPHAN = """
    import sys, time, psutil
    from pathlib import Path
    from nemotron_steps.config.schema.policy import VllmConfig
    from nemotron_steps.engine.generation.vllm.generator import VllmGenerator

    if __name__ == "__main__":
        generator = VllmGenerator(
            Path(sys.argv[1]),
            VllmConfig(async_engine=True, enforce_eager=True, max_num_seqs=32),
            max_total_length=64,
            precision="float32",
        )
        print("children", *[p.pid for p in psutil.Process().children(recursive=True)], flush=True)
        time.sleep(600)
"""


FORKED = """
    import multiprocessing, os, time
    from types import SimpleNamespace
    from nemotron_steps.engine.generation.vllm.worker import OfferedTransfer

    def engine():
        OfferedTransfer(None, SimpleNamespace(parallel_config=None, model_config=None), None, None)
        print("children", os.getpid(), flush=True)
        time.sleep(600)

    process = multiprocessing.get_context("fork").Process(target=engine)
    process.start()
    process.join()
"""
"""What vLLM does where this process has not used CUDA yet, and never on CPU. The child has all modules already: none
that it imports tells it what it is."""


@pytest.mark.parametrize("program", [ORPHAN, FORKED], ids=["spawned", "forked"])
def test_an_engine_ends_with_the_process_that_started_it(model, tmp_path, program):
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(program))
    with subprocess.Popen([sys.executable, str(script), str(model[0])], stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            line = next(line for line in parent.stdout if line.startswith("children"))
            children = [psutil.Process(int(pid)) for pid in line.split()[1:]]
        finally:
            parent.kill()
    assert children
    _, alive = psutil.wait_procs(children, timeout=20)
    assert alive == []


def test_a_killed_engine_is_a_lost_worker(generator, model):  # the last one: it has no engine any more
    _, network = model
    generator.submit(GenerationRequest("lost", PROMPTS[0], SamplingParams(max_new_tokens=40, stop_token_ids=(EOS,)), 4))
    for process in engines():
        os.kill(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    with pytest.raises(WorkerLostError, match="vLLM engine"):
        while time.monotonic() < deadline:
            generator.step()
    with pytest.raises(WorkerLostError, match="vLLM engine"):
        generator.submit(GenerationRequest("later", PROMPTS[0], SamplingParams(max_new_tokens=4), 1))
    generator.cancel("lost")
    generator.cancel("later")
    with pytest.raises(WorkerLostError, match="vLLM engine"):
        generator.update_weights(network.state_dict().items(), 1000)
