"""How many held-out pairs a judge is asked at once."""

from __future__ import annotations

import json

import pytest
import torch

from nemotron_steps.config.layout.memory.generation import GIB
from nemotron_steps.steps.supervised import judged_at_once
from tests.config.layout.memory.shapes import QWEN3_8B


@pytest.fixture
def judge(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    return tmp_path


@pytest.mark.parametrize(("pairs", "expected"), [(16, 16), (200, 200), (1000, 256), (0, 1)])
def test_on_cpu_no_more_rows_are_made_than_there_are_pairs(judge, monkeypatch, pairs, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert judged_at_once(judge, pairs, 4096, "float32") == expected


def test_a_judge_on_a_gpu_takes_the_memory_that_is_free(judge, monkeypatch):
    """256 rows of 4,096 tokens were made for 16 pairs, more than an H100 has."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (60 * GIB, 80 * GIB))
    assert judged_at_once(judge, 16, 4096, "bfloat16") == 16
    assert 30 < judged_at_once(judge, 200, 4096, "bfloat16") < 60
    assert judged_at_once(judge, 200, 131_072, "bfloat16") == 1
