"""Reward functions as users write them, for the tests."""

import asyncio

import numpy as np


def matches(prompts, completions, answer):
    """TRL's with a column of the data; a chat's completions are lists of messages."""
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    print("what a function prints is nobody's answer")
    return [1.0 if text.strip() == key else 0.0 for text, key in zip(texts, answer, strict=True)]


async def slow_matches(prompts, completions, answer):
    await asyncio.sleep(0.001)
    return matches(prompts, completions, answer)


def sometimes(completions, **kwargs):
    return [None if text == "?" else 2.0 for text in completions]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """verl's."""
    return {"score": float(data_source == "sums" and solution_str == ground_truth), "extra": extra_info}


def without_a_score(solution_str, ground_truth):
    """verl's too, with other names than `score`."""
    return {"acc": 1.0, "pred": solution_str}


def for_one(given):
    """A function of verl's signature that always gives this."""
    return lambda solution_str, ground_truth: given


def for_all(give):
    """A function of TRL's signature that gives this for so many answers."""
    return lambda completions, **kwargs: give(len(completions))


a_nested_score = for_one({"score": {"acc": 1.0}})
no_score = for_one({"score": None})
a_numpy_score = for_one({"score": np.float32(0.5), "acc": np.bool_(True)})
too_few = for_all(lambda count: [1.0])
a_text = for_all(lambda count: ["good"] * count)
not_a_number = for_all(lambda count: [float("nan")] * count)
huge = for_all(lambda count: [1e38] * count)
an_array = for_all(lambda count: Array([1.0] * count))
a_numpy_number = for_all(lambda count: np.float64(2))
one_number = for_all(lambda count: 2)


def raises(completions, **kwargs):
    raise RuntimeError("no such key: gold")


def hangs(completions, **kwargs):
    while True:
        pass


def numbers(completions, **kwargs):
    """Of each answer, less the least: all of them have to be numbers."""
    values = [float(text) for text in completions]
    if max(values) > 1e6:
        hangs(completions)
    return [value - min(values) for value in values]


def of_tokens(completions, completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


def plain_score(solution_str, ground_truth):
    return solution_str == ground_truth


class Array:
    """What an array library gives."""

    def __init__(self, values):
        self.values = values

    def __iter__(self):
        return iter(self.values)

    def tolist(self):
        return self.values


LIMIT = 3
