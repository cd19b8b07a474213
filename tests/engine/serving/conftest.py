import pytest

from nemotron_steps.engine.generation.sampler import AsyncSampler
from nemotron_steps.engine.serving.endpoint import Endpoint
from nemotron_steps.engine.types import SamplingParams
from nemotron_steps.models.chat import ChatFormat
from tests.engine.serving.taught_model import MAX_LENGTH, embedded, make_taught_checkpoint


@pytest.fixture(scope="session")
def taught(tmp_path_factory):
    folder = tmp_path_factory.mktemp("taught")
    assert make_taught_checkpoint(folder) < 0.05
    return folder


@pytest.fixture(scope="session")
def chat(taught):
    return ChatFormat.from_folder(taught)


@pytest.fixture(scope="session")
def endpoint(taught, chat):
    """The taught model behind HTTP, alone with its generator."""
    generator = embedded(taught, chat)
    with Endpoint(
        AsyncSampler(generator, name="served"),
        chat,
        name="tiny",
        max_total_length=MAX_LENGTH,
        defaults=SamplingParams(max_new_tokens=120, stop_token_ids=(chat.tokenizer.eos_token_id,)),
        own_loop=True,
    ) as endpoint:
        endpoint.generator = generator
        yield endpoint
    generator.close()
