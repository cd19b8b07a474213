"""How each family's config.json is read, and which parameters its layers have: a module for families that are alike.

A module has

    read(config, where) -> Architecture
    parameters(architecture) -> Iterator[Parameter]     of the whole model, in the order of the layers
    CARRIED: str                                        prefix of tensors that travel along, unread; "" for none
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from nemotron_steps.config.families import FAMILIES


def module_of(family: str) -> Any:
    """The module of a family of the table."""
    return import_module(f"{__name__}.{FAMILIES[family].module}")
