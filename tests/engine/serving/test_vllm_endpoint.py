"""The endpoint over a real vLLM engine."""

import pytest

from nemotron_steps.config.schema.policy import VllmConfig
from nemotron_steps.engine.generation.sampler import AsyncSampler
from nemotron_steps.engine.serving.endpoint import Endpoint
from nemotron_steps.engine.types import SamplingParams
from tests.engine.serving.taught_model import CALL, GREETING, MAX_LENGTH, QUESTION, RESULT, TOOL
from tests.engine.serving.test_chat_api import NESTED_TOOL, complete
from tests.engine.serving.test_responses_api import respond

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]


def test_chat_and_responses_over_vllm(taught, chat):
    from nemotron_steps.engine.generation.vllm.generator import VllmGenerator

    generator = VllmGenerator(
        taught, VllmConfig(enforce_eager=True, max_num_seqs=16), max_total_length=MAX_LENGTH, precision="float32"
    )
    with Endpoint(
        AsyncSampler(generator),
        chat,
        name="tiny",
        max_total_length=MAX_LENGTH,
        defaults=SamplingParams(max_new_tokens=120, stop_token_ids=(chat.tokenizer.eos_token_id,)),
        own_loop=True,
    ) as endpoint:
        answer = complete(endpoint, [GREETING], n=3, logprobs=True, return_token_ids=True)
        for choice in answer["choices"]:
            assert choice["message"] == {"role": "assistant", "content": "Hi.", "reasoning_content": "be kind"}
            assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
            assert chat.decode(choice["token_ids"]) == "<think>be kind</think>Hi."
        called = complete(endpoint, [QUESTION], tools=[NESTED_TOOL], return_token_ids=True)
        assert chat.decode(called["choices"][0]["token_ids"]) == CALL
        assert complete(endpoint, [GREETING], stop=["H"])["choices"][0]["message"]["content"] == ""
        wanted = respond(endpoint, [QUESTION], tools=[TOOL])["output"][-1]
        result = {"type": "function_call_output", "call_id": wanted["call_id"], "output": RESULT["content"]}
        second = respond(endpoint, [QUESTION, wanted, result], tools=[TOOL])["output"][-1]
        assert second["content"][0]["text"] == "It is 2."
        prefix = wanted["prompt_token_ids"] + wanted["generation_token_ids"]
        assert second["prompt_token_ids"][: len(prefix)] == prefix
    generator.close()
