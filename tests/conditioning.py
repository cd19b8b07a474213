"""Compares numbers by their conditioning: by how far they move when what they are computed from is rounded otherwise.

Two ways to one number differ by rounding, and another processor, number of threads or order of a sum rounds otherwise.
What arrives of that is no constant: of the exponential of a difference of logprobs, it is the difference's error times
the exponential; of a mean of advantages of both signs, a share of what cancels; of weights after a step, what Adam
makes of a gradient's error. So what is expected is computed a few times more, from inputs moved at random by a unit in
the last place, and what is found may be off by a fixed multiple of how far that moves each number. What is drawn is
compared up to the first draw that rounding decides.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

UNIT = 2.0**-23
"""Of float32: how far inputs are moved, relatively, as a standard deviation."""
FACTOR = 16
"""How many times as far as that moved a number it may be off."""
SUM = 256
"""Of a single number, how many units at least: sums of squares and the like round in each of their thousands of terms,
the more the fewer of them a processor adds at once."""
DRAWS = 3
COUNTED = re.compile(r"clip_fraction|\w*oob_ratio|outside_truncation|router_replay_mismatch|mtp_\d_acceptance_rate")
TIED = 2
"""Metrics that are shares of the trained tokens for which something is greater than something else, and how many tokens
may be decided by rounding."""


def assert_conditioned(found: Any, compute: Callable[..., Any], *inputs: Any) -> None:
    """Fail unless `found` is `compute(*inputs)` but for rounding: see `Conditioned`."""
    Conditioned(compute, *inputs).check(found)


class Conditioned:
    """What `compute(*inputs)` gives, and how far rounding may move each of its numbers.

    Args:
        compute: gives numbers and tensors, in dicts and lists.
        inputs: float tensors, dataclasses and modules with such, or folders of checkpoints in safetensors. Others are
            left as they are, and so are masks, of zeros and ones.
    """

    def __init__(self, compute: Callable[..., Any], *inputs: Any) -> None:
        self.value = compute(*inputs)
        self._moved = []
        for seed in range(DRAWS):
            with tempfile.TemporaryDirectory() as scratch:
                generator = torch.Generator().manual_seed(seed)
                self._moved.append(compute(*(_moved(each, generator, Path(scratch)) for each in inputs)))

    def __getitem__(self, key: Any) -> Conditioned:
        """A part of it, to be checked by itself."""
        part = object.__new__(Conditioned)
        part.value, part._moved = self.value[key], [each[key] for each in self._moved]
        return part

    def check(self, found: Any) -> None:
        """Raises AssertionError with the first number that is further off than rounding explains."""
        _check("", found, self.value, self._moved)


def with_gradients(compute: Callable[..., torch.Tensor], upstream: torch.Tensor, *leaves: torch.Tensor) -> list[Any]:
    """What `compute(*leaves)` gives, and the gradient of each of them, given that of what it gives."""
    leaves = tuple(leaf.detach().clone().requires_grad_() for leaf in leaves)
    out = compute(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def in_float64(compute: Callable[..., torch.Tensor]) -> Callable[..., list[Any]]:
    """The same, of float64."""
    return lambda *given: with_gradients(compute, *(each.double() for each in given))


def _moved(value: Any, generator: torch.Generator, scratch: Path) -> Any:
    if isinstance(value, torch.Tensor):
        if not value.is_floating_point() or bool(((value == 0) | (value == 1)).all()):
            return value
        noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        unit = max(UNIT, torch.finfo(value.dtype).eps)
        moved = (value.detach().double() * (1 + unit * noise)).to(value.dtype)
        return moved.requires_grad_(value.requires_grad)
    if isinstance(value, Path):
        folder = Path(tempfile.mkdtemp(dir=scratch)) / value.name
        shutil.copytree(value, folder)
        for file in folder.rglob("*.safetensors"):
            with safe_open(file, "pt") as stored:
                tensors = {name: _moved(stored.get_tensor(name), generator, scratch) for name in stored.keys()}  # noqa: SIM118
                about = stored.metadata()
            save_file(tensors, file, about)
        return folder
    if isinstance(value, torch.nn.Module):
        module = copy.deepcopy(value)
        for parameter in module.parameters():
            parameter.data = _moved(parameter.data, generator, scratch)
        return module
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **{name: _moved(each, generator, scratch) for name, each in fields.items()})
    return value


def _check(where: str, found: Any, value: Any, moved: Sequence[Any], tied: float = 0.0) -> None:
    if isinstance(value, Mapping):
        assert set(found) == set(value), where
        for key in value:
            counted = COUNTED.fullmatch(str(key)) and value.get("num_valid_tokens")
            tied = TIED / value["num_valid_tokens"] if counted else 0.0
            percent = 100 if str(key).endswith("_rate") else 1
            _check(f"{where}[{key!r}]", found[key], value[key], [each[key] for each in moved], tied * percent)
        return
    if isinstance(value, (list, tuple)) and not all(isinstance(each, float) for each in value):
        assert len(found) == len(value), where
        for place, each in enumerate(value):
            _check(f"{where}[{place}]", found[place], each, [other[place] for other in moved])
        return
    if not isinstance(value, (float, list, tuple, torch.Tensor)) or (
        isinstance(value, torch.Tensor) and not value.is_floating_point()
    ):
        assert torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value, where
        return
    wanted, got, *others = (torch.as_tensor(each).detach().double() for each in (value, found, *moved))
    assert got.shape == wanted.shape, (where, got.shape, wanted.shape)
    decided = torch.stack([other.isfinite() == wanted.isfinite() for other in others]).all(0)
    finite = wanted.isfinite()
    assert torch.equal(got[decided & ~finite], wanted[decided & ~finite]), f"{where}: {found} for {value}"
    compared = decided & finite
    if not bool(compared.any()):
        return
    wanted, got = wanted[compared], got[compared]
    spread = max(float((other[compared] - wanted).abs().max()) for other in others)
    scale = float(wanted.abs().max())
    tolerance = max(FACTOR * spread, (FACTOR if wanted.numel() > 1 else SUM) * UNIT * scale) + tied
    off = (got - wanted).abs()
    worst = int(off.argmax())
    assert float(off[worst]) <= tolerance, (
        f"{where}: {float(got[worst])} for {float(wanted[worst])}, which rounding moves by {spread:.2g}; "
        f"allowed {tolerance:.2g}"
    )
    # What could not fail shows nothing.
    assert FACTOR * spread <= 5e-2 * max(scale, 1e-1), f"{where}: {scale:.3g} is moved by {spread:.2g}: ill-conditioned"
