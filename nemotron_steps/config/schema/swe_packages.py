"""Packages that `data_prep/swe_tasks` and `data_prep/sft_prep` make up, and the faults that are put into them."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field, PositiveInt

from nemotron_steps.config.schema.base import Section

MutationKind = Literal["operator", "comparison", "boolean", "constant", "condition", "arguments", "return"]
MUTATION_KINDS: tuple[MutationKind, ...] = get_args(MutationKind)


class MadeUpPackages(Section):
    """`made_up.*`: packages that the step makes itself: modules of a few one-line functions, with their tests.

    Which split a package is in follows from its text alone, so held-out packages are the same whatever seed and sizes.
    """

    seed: int = 42
    functions: int = Field(1, ge=1, le=8)
    """Functions of a module."""
    mutations: tuple[MutationKind, ...] = Field(("operator", "comparison"), min_length=1)
    validation_fraction: float = Field(0.1, ge=0, le=0.4)
    heldout_fraction: float = Field(0.1, ge=0, le=0.4)


class SweDemonstrations(Section):
    """`swe.*`: chats in which an agent solves tasks of made-up packages with the tools of `swe_agent`."""

    made_up: MadeUpPackages = MadeUpPackages()
    share: float = Field(1.0, gt=0, le=1)
    """Of the chats; the others are reasoning_gym's."""
    slip_rate: float = Field(0.0, ge=0, le=1)
    """Share of demonstrations that change the line to another wrong one, or do not change it."""
    chats_per_task: PositiveInt = 1
    """Different demonstrations of one task."""
