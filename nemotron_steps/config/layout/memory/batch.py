"""From the prompts of a step to the micro-batches of a rank, in rollouts and tokens."""

from __future__ import annotations

from dataclasses import dataclass

from nemotron_steps.config.layout.memory.settings import MemorySettings


@dataclass(frozen=True)
class BatchArithmetic:
    """How the work of a step is cut. None: a step that samples nothing, or ranks that do not come out even.

    Attributes:
        batch: sequences (pairs, for DPO) of one optimizer step.
        updates: optimizer steps of a training step.
        rows: of a data-parallel rank in one optimizer step.
        micro_batches: at most, of a rank in one optimizer step.
        micro_rows: sequences of a micro-batch, at most.
        tokens: of a micro-batch, at most: a prompt that its rows share is counted once.
        trained: of them, tokens whose logprobs have a gradient.
        budget: whether a number of tokens cuts the micro-batches, and not a number of rows.
    """

    prompts: int | None
    group: int | None
    rollouts: int | None
    batch: int
    updates: int | None
    data_parallel: int
    rows: int
    micro_batches: int
    micro_rows: int
    tokens: int
    trained: int
    budget: bool

    @classmethod
    def of(cls, settings: MemorySettings, *, logprobs: bool = False) -> BatchArithmetic | None:
        """Of a config; None where its batch does not split over the ranks.

        Args:
            logprobs: of the pass that computes logprobs without training.
        """
        sizes = settings.sizes
        if sizes.batch is None or sizes.batch < 1 or not sizes.data_parallel:
            return None
        unit = settings.rows_per_unit
        rows = -(-sizes.batch // sizes.data_parallel) * unit
        budget = settings.logprob_budget if logprobs else settings.budget
        size = (settings.logprob_batch if logprobs else settings.micro_batch) * unit
        if budget is None:
            micro_rows = min(size, rows)
            tokens, trained = _tokens(settings, micro_rows)
            count = -(-rows // micro_rows)
        else:
            all_tokens, all_trained = _tokens(settings, rows)
            tokens = min(budget, all_tokens)
            trained, count = min(tokens, all_trained), -(-all_tokens // budget)
            micro_rows = min(rows, max(1, tokens * rows // all_tokens))
        updates = sizes.rollouts // sizes.batch if sizes.rollouts else None
        return cls(
            sizes.prompts if sizes.samples else None,
            sizes.group if sizes.samples else None,
            sizes.rollouts if sizes.samples else None,
            sizes.batch,
            updates,
            sizes.data_parallel,
            rows,
            count,
            micro_rows,
            tokens,
            trained,
            budget is not None,
        )


def prompt_and_answer(settings: MemorySettings) -> tuple[int, int]:
    """Tokens of the prompts and answers of which a micro-batch has most: answers of full length."""
    if not settings.sizes.samples:
        return 0, settings.longest
    answer = min(settings.max_new_tokens, settings.longest)
    return settings.longest - answer, answer


def _tokens(settings: MemorySettings, rows: int) -> tuple[int, int]:
    """Tokens of so many rows as they are computed, and how many of them are trained on."""
    prompt, answer = prompt_and_answer(settings)
    # Only the flat policy computes a shared prompt once.
    group = 1 if settings.sizes.dtensor else settings.sizes.group or 1
    prompts = -(-rows // group) if settings.sizes.samples else 0
    return prompts * prompt + rows * answer, rows * answer
