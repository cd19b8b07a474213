"""One list of arguments for several functions: written once, in the signature and help of each."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

_ENTRY = re.compile(r"^        request: .*\n", re.MULTILINE)


def arguments_of(listed: Callable[..., Any]) -> Callable[[FunctionT], FunctionT]:
    """Show a function's `**request` as what it is handed on to.

    Its signature has the keyword arguments of `listed` before its own, and its docstring their descriptions in place
    of the entry `request`.
    """

    def show(function: FunctionT) -> FunctionT:
        own = inspect.signature(function)
        *rest, _request = own.parameters.values()
        more = [each for name, each in inspect.signature(listed).parameters.items() if name not in own.parameters]
        merged = sorted((*more, *rest), key=lambda each: each.kind)
        function.__signature__ = own.replace(parameters=merged)  # type: ignore[attr-defined]
        described = (listed.__doc__ or "").partition("    Args:\n")[2].partition("\n\n")[0] + "\n"
        function.__doc__ = _ENTRY.sub(lambda _: described, function.__doc__ or "")
        return function

    return show
