"""How each family's config.json is read, and which parameters it has: a module for families that are alike, with
`read(config, where) -> Architecture`, `parameters(architecture) -> Iterator[Parameter]` in the order of the layers, and
CARRIED, the prefix of tensors that travel along, unread ("" for none)."""

from importlib import import_module
from typing import Any

from nemotron_steps.config.families import FAMILIES


def module_of(family: str) -> Any:
    """The module of a family of the table."""
    return import_module(f"{__name__}.{FAMILIES[family].module}")
