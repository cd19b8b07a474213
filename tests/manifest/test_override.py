"""Relative overrides become plain ones that can be pasted."""

import pytest

from nemotron_steps.manifest.override import is_override, resolve_override, resolved_overrides

CONFIG = {"a": {"kl": 1e-4, "zero": 0, "batch": 8, "on": True, "none": None}}
CONFIG["a"] |= {"below": -0.25, "tiny": 1.23456789e-05, "whole": 2.0}


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("a.kl*=10|0.001", "a.kl=0.001"),
        ("a.zero*=10|0.001", "a.zero=0.001"),
        ("a.none/=2|7", "a.none=7"),
        ("a.batch/=100|1", "a.batch=1"),
        ("a.kl/=3|1", "a.kl=3.33333e-05"),
        ("~a.kl", "~a.kl"),
        ("a.batch<=4", "a.batch=4"),
        ("a.batch<=8", ""),
        ("a.kl>=0.01", "a.kl=0.01"),
        ("a.below*=2|7", "a.below=-0.5"),
        ("a.tiny*=1|7", "a.tiny=1.23457e-05"),
    ],
)
def test_resolve(text: str, plain: str) -> None:
    assert is_override(text)
    assert resolve_override(text, CONFIG) == plain


@pytest.mark.parametrize(
    "text", ["a.kl", "raise the KL", "a.kl*=2", "a.kl*=x|1", "", "=1", "+++a=1", "~a=b", "~", "a b=1", "a|b=1"]
)
def test_not_an_override(text: str) -> None:
    assert not is_override(text)


def test_what_the_run_had_already_is_no_advice() -> None:
    texts = ("a.kl=0.0001", "a.batch=8", "a.on=true", "a.on=false", "a.batch<=8", "a.new=1", "~a.kl")
    assert resolved_overrides(texts, CONFIG) == ("a.on=false", "a.new=1", "~a.kl")


def test_the_dtensor_policy_is_advised_on_its_own_optimizer() -> None:
    policy = {"dtensor_cfg": {"enabled": True}, "optimizer": {"kwargs": {"lr": 0.02}}, "precision": "bfloat16"}
    lr, warmup = "policy.megatron_cfg.optimizer.lr/=20|1e-6", "policy.megatron_cfg.scheduler.lr_warmup_iters*=2|10"
    advice = resolved_overrides([lr, warmup, "policy.precision=float32"], {"policy": policy})
    assert advice == ("policy.optimizer.kwargs.lr=0.001", "policy.precision=float32")


@pytest.mark.parametrize(
    ("answer", "longest", "end", "advice"),
    [
        (2048, 4096, None, ["16384", "18432"]),
        (512, 2048, 8192, ["4096", "5632", "11776"]),
        (8192, 8192, None, ["65536", "65536", "65536"]),
    ],
)
def test_longer_answers_come_with_a_longer_sequence_where_that_is_the_bound(
    answer: int, longest: int, end: int | None, advice: list[str]
) -> None:
    lengths = {"max_total_sequence_length": longest, "max_total_sequence_length_end": end}
    policy = {"generation": {"max_new_tokens": answer}, **lengths}
    policy |= {"sequence_packing": {"train_mb_tokens": 16384, "logprob_mb_tokens": None}} if answer == 8192 else {}
    given = resolved_overrides(["policy.generation.max_new_tokens*=8|1024"], {"policy": policy})
    assert [text.partition("=")[2] for text in given] == advice
