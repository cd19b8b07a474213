"""Prompts computed once, shared prefixes, and the grid that shares them while decoding."""

import pytest
import torch

from nemotron_steps.engine.generation.embedded.dense_model import CachedDenseModel
from nemotron_steps.engine.generation.embedded.hybrid_model import CachedHybridModel
from nemotron_steps.engine.generation.embedded.prefix_cache import (
    Prefix,
    PrefixCache,
    block_keys,
)
from tests.engine.generation.embedded.embedded_models import hub_weights, random_model


def tokens(seed: int, length: int) -> tuple[int, ...]:
    return tuple(torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


@pytest.fixture(scope="module")
def hybrid() -> CachedHybridModel:
    reference, architecture = random_model("mixture")
    model = CachedHybridModel(architecture, device=torch.device("cpu"), dtype=torch.float32)
    with torch.inference_mode():
        model.load(hub_weights(reference).items())
    return model


@pytest.fixture(scope="module")
def model() -> CachedDenseModel:
    reference, architecture = random_model("qwen3-tied")
    model = CachedDenseModel(architecture, max_positions=512, device=torch.device("cpu"), dtype=torch.float32)
    with torch.inference_mode():
        model.load(reference.state_dict().items())
    return model


def assert_same(prefix: Prefix, expected: Prefix) -> None:
    assert prefix.tokens == expected.tokens
    assert prefix.logits is not None
    assert expected.logits is not None
    pairs = [(prefix.keys, expected.keys), (prefix.values, expected.values), (prefix.logits, expected.logits)]
    if prefix.states is not None and expected.states is not None:
        pairs += [(prefix.states.ssm, expected.states.ssm), (prefix.states.window, expected.states.window)]
    for a, b in pairs:
        torch.testing.assert_close(a, b, atol=3e-5 if prefix.states else 1e-5, rtol=1e-4 if prefix.states else 1e-5)


@pytest.mark.parametrize("kind", ["model", "hybrid"])
@torch.inference_mode()
def test_prompts_with_common_beginnings_are_computed_once_and_correctly(
    kind: str, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(kind)
    instructions = tokens(0, 90)
    prompts = [instructions + tokens(i, 5 + i) for i in range(1, 9)] + [tokens(99, 40), instructions[:32]]
    cache = PrefixCache(model, 10_000)
    computed = cache.compute(prompts)
    for prompt in prompts:
        assert_same(computed[prompt], PrefixCache(model, 0).compute([prompt])[prompt])
    # 80 of the 90 shared tokens are whole blocks: fed once, not eight times.
    assert cache.fed_tokens <= sum(map(len, prompts)) - 7 * 80
    fed = cache.fed_tokens
    assert cache.compute(prompts).keys() == set(prompts)
    assert cache.fed_tokens == fed
    later = instructions + tokens(50, 7)
    assert_same(cache.compute([later])[later], PrefixCache(model, 0).compute([later])[later])
    assert cache.fed_tokens == fed + len(later) - 80


def test_block_keys_name_everything_up_to_their_end() -> None:
    prompt = tokens(1, 48)
    assert len(block_keys(prompt)) == 2
    assert len(block_keys(prompt, proper=False)) == 3
    assert block_keys((*prompt, 5))[:2] == block_keys(prompt)
    changed = (prompt[0] ^ 1, *prompt[1:])
    assert not set(block_keys(prompt)) & set(block_keys(changed))


@torch.inference_mode()
def test_a_beginning_computed_with_older_weights_is_not_shared_by_rows_that_join_later(model: CachedDenseModel) -> None:
    cache = PrefixCache(model, 10_000)
    instructions = tokens(0, 64)

    def joining(*seeds: int) -> list[Prefix]:
        prompts = [instructions + tokens(seed, 9) for seed in seeds]
        computed = cache.compute(prompts)
        return [computed[prompt] for prompt in prompts]

    running = cache.choose_shared(joining(1, 2, 3, 4), [])
    assert running[0] is not None and running == running[:1] * 4
    live = [prefix for prefix in running if prefix is not None]
    assert cache.choose_shared(joining(5), live) == running[:1]
    cache.clear()
    assert cache.choose_shared(joining(5), live) == [None]
