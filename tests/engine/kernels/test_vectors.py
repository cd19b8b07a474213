"""The functions of vectors.h against float64, over all of their range and on vectors of every width."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nemotron_steps.engine.kernels import SPIN_COUNT, bound_spinning, compiler

pytestmark = pytest.mark.compiler

SOURCE = """
#include "vectors.h"
#define OVER_AN_ARRAY(NAME, FUNCTION) void NAME(const float *x, float *y, int64_t count) { \\
    _Pragma("omp simd") for (int64_t i = 0; i < count; i++) y[i] = FUNCTION(x[i]); }
OVER_AN_ARRAY(exponentials, fast_exp)
OVER_AN_ARRAY(sigmoids, sigmoid)
int64_t lanes(void) { return LANES; }
"""
EVERY = np.arange(0, 2**32, 1021, dtype=np.uint64).astype(np.uint32).view(np.float32)
"""Floats of every magnitude, the denormal, the infinite and those that are no numbers among them."""


@pytest.fixture
def functions(kernels_for: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    sources = tmp_path / "sources"
    sources.mkdir()
    shutil.copy(Path(compiler.__file__).parent / "vectors.h", sources)
    (sources / "functions.c").write_text(SOURCE)
    monkeypatch.setattr(compiler, "_SOURCES", sources)
    command = compiler.find_compiler()
    assert command is not None
    library = compiler.load(command, tmp_path / "kernels")
    assert library.lanes() == {"x86-64": 4, "haswell": 8, "skylake-avx512": 16}[kernels_for]
    return library


def values(function: ctypes._NamedFuncPointer, x: np.ndarray) -> np.ndarray:
    y = np.empty_like(x)
    function(ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(y.ctypes.data), ctypes.c_int64(len(x)))
    return y


def test_an_exponential_is_off_by_a_unit_in_the_last_place(functions: ctypes.CDLL) -> None:
    x = EVERY[(EVERY >= -87) & (EVERY <= 88)]
    expected = np.exp(x.astype(np.float64))
    error = np.abs(values(functions.exponentials, x) - expected) / np.spacing(expected.astype(np.float32))
    assert len(x) > 1_000_000
    assert error.max() < 1.1


def test_an_exponential_vanishes_far_below_zero_and_keeps_what_is_no_number(functions: ctypes.CDLL) -> None:
    assert not values(functions.exponentials, EVERY[EVERY < -87]).any()
    assert np.isnan(values(functions.exponentials, EVERY[np.isnan(EVERY)])).all()
    assert not np.isfinite(values(functions.exponentials, np.full(9, np.inf, np.float32))).any()


def test_a_sigmoid_is_near_float64_at_every_magnitude(functions: ctypes.CDLL) -> None:
    x = EVERY[~np.isnan(EVERY)]
    with np.errstate(over="ignore"):
        expected = 1 / (1 + np.exp(-x.astype(np.float64)))
    np.testing.assert_allclose(values(functions.sigmoids, x), expected, rtol=2e-7, atol=2e-38)


@pytest.mark.parametrize("said", [{"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}, {}])
def test_openmps_threads_spin_for_a_bounded_time_unless_their_user_says_otherwise(said: dict[str, str]) -> None:
    environment = dict(said)
    bound_spinning(environment)
    assert environment == (said or {"GOMP_SPINCOUNT": str(SPIN_COUNT)})
    code = "import sys, nemotron_steps.engine.kernels; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
