"""Reward functions as users write them, for the tests."""

from __future__ import annotations

import asyncio

import numpy as np


def length(completions, **kwargs):
    """TRL's smallest: any columns, one list."""
    return [float(len(text)) for text in completions]


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


def of_nothing(solution_str, ground_truth):
    return {}


def a_nested_score(solution_str, ground_truth):
    return {"score": {"acc": 1.0}}


def no_score(solution_str, ground_truth):
    return {"score": None}


def a_numpy_score(solution_str, ground_truth):
    return {"score": np.float32(0.5), "acc": np.bool_(True)}


def dicts(completions, **kwargs):
    return [{"score": 1.0} for _ in completions]


def one_dict(completions, **kwargs):
    return {"score": [1.0] * len(completions)}


def a_word(completions, **kwargs):
    return "no"


def digits(completions, **kwargs):
    return ["1"] * len(completions)


def too_few(completions, **kwargs):
    return [1.0]


def too_many(completions, **kwargs):
    return [1.0] * (len(completions) + 1)


def a_text(completions, **kwargs):
    return ["good"] * len(completions)


def not_a_number(completions, **kwargs):
    return [float("nan")] * len(completions)


def infinite(solution_str, ground_truth):
    return -float("inf")


def huge(completions, **kwargs):
    return [1e38] * len(completions)


def beyond_float32(completions, **kwargs):
    return [1e39] * len(completions)


def too_large(completions, **kwargs):
    return [10**400] * len(completions)


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


def answers_alone(completions, answer):
    return [float(text == key) for text, key in zip(completions, answer, strict=True)]


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


def an_array(completions):
    return Array([1.0] * len(completions))


def a_numpy_number(completions):
    return np.float64(2)


def one_number(completions):
    return 2


def an_option(completions, trainer_state=None):
    return [1.0] * len(completions)


LIMIT = 3
