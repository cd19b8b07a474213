"""Every shard of a preparation, over processes; shards that an earlier attempt finished are not made again."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import cache
from itertools import islice

from nemotron_steps.engine.workers.workers import end_with_parent
from nemotron_steps.errors import WorkerLostError
from nemotron_steps.steps.data_prep.blends import formats
from nemotron_steps.steps.data_prep.blends.shards import RowFunction, RowWork, Shard, ShardTask, finished, make_shard

Done = Callable[[Shard], None]
"""Called with every shard, in any order, also those that an earlier attempt made."""


def make_shards(tasks: Sequence[ShardTask], work: RowWork, num_workers: int, done: Done) -> list[Shard]:
    """The shard of every task, in the order of the tasks."""
    shards: dict[str, Shard] = {}
    for task in tasks:
        earlier = finished(task)
        if earlier is not None:
            shards[task.name] = earlier
            done(earlier)
    missing = [task for task in tasks if task.name not in shards]
    # A process takes seconds to start: each must have something to do.
    worth = -(-8 * sum(task.part.size for task in missing) // formats.PART_BYTES)
    workers = min(num_workers, len(missing), worth)
    for shard in _here(missing, work) if workers <= 1 else _pooled(missing, work, workers):
        shards[shard.task.name] = shard
        done(shard)
    return [shards[task.name] for task in tasks]


def make_sample(tasks: Sequence[ShardTask], rows: int, work: RowWork, done: Done) -> list[Shard]:
    """Shards of the first `rows` rows of the tasks, one after the other."""
    shards: list[Shard] = []
    once = cache(work)
    for task in tasks:
        shards += make_shards([replace(task, limit=rows)], once, 1, done)
        rows -= shards[-1].row_counts.read
        if rows == 0:
            break
    return shards


def _here(tasks: Sequence[ShardTask], work: RowWork) -> Iterator[Shard]:
    function = work() if tasks else None
    for task in tasks:
        assert function is not None
        yield make_shard(task, function)


def _pooled(tasks: Sequence[ShardTask], work: RowWork, num_workers: int) -> Iterator[Shard]:
    pool = ProcessPoolExecutor(
        num_workers,
        # Not forked: threads of this process may hold locks.
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(work, os.getpid()),
    )
    waiting = iter(tasks)
    running: set[Future[Shard]] = set()
    try:
        running |= {pool.submit(_make, task) for task in islice(waiting, 2 * num_workers)}
        while running:
            ready, running = wait(running, return_when=FIRST_COMPLETED)
            running |= {pool.submit(_make, task) for task in islice(waiting, len(ready))}
            for future in ready:
                yield future.result()
    except BrokenProcessPool as error:
        raise WorkerLostError(
            "a worker process of the data preparation died",
            expected="workers that live",
            found=str(error),
            hints=("run the same command again: finished shards are kept", "num_workers=1"),
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_function: RowFunction | None = None


def _begin(work: RowWork, parent: int) -> None:
    global _function
    end_with_parent()
    if os.getppid() != parent:  # killed while this process was starting
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is told, and ends this process
    _function = work()


def _make(task: ShardTask) -> Shard:
    assert _function is not None  # _begin ran
    return make_shard(task, _function)
