"""What is left out of collections, and what is freed first."""

from __future__ import annotations

import atexit
import gc

import pytest
import torch

from nemotron_steps.engine import memory_tuning as kept_objects


class Cycle:
    """An object that only the collector frees."""

    freed = 0

    def __init__(self):
        self.own = self

    def __del__(self):
        Cycle.freed += 1


def test_objects_that_are_still_used_are_left_out_of_collections_and_others_freed_first(monkeypatch):
    at_exit = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    monkeypatch.setattr(atexit, "unregister", lambda _: at_exit.clear())
    Cycle.freed = 0
    try:
        for number in (1, 2):  # of two runs in one process, the second freezes anew
            Cycle()
            kept_objects.freeze_objects()
            assert Cycle.freed == number and gc.get_freeze_count() > 1000
        kept = Cycle()
        kept_objects.freeze_objects()
        del kept
        kept_objects.freeze_objects()
        assert Cycle.freed == 3
        assert at_exit == [gc.unfreeze]
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("gpu", [False, True])
def test_what_an_earlier_run_left_is_freed_where_it_may_be_memory_of_a_gpu(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    gc.collect()
    Cycle.freed = 0
    Cycle()
    kept_objects.free_left_gpu_memory()
    assert Cycle.freed == gpu
