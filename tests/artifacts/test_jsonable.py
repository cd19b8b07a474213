"""Any value as strict JSON, and numbers back from it."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemotron_steps.artifacts.files import as_float, plain

HALF = json.loads(r'"\ud83d"')


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (-math.inf, "-inf"),
        ("größer", "größer"),
        (HALF, "?"),
        ({HALF: [HALF], 1: ({2: math.nan}, {3}, frozenset())}, {"?": ["?"], "1": [{"2": "nan"}, [3], []]}),
        (np.float32(0.5), 0.5),
        (np.float64("inf"), "inf"),
        (np.array([[1, 2]]), [[1, 2]]),
        (np.array([0.5, math.nan]), [0.5, "nan"]),
        (Path("a/b"), "a/b"),
        (Path(HALF), "?"),
    ],
)
def test_a_value_becomes_what_json_has(value: Any, expected: Any) -> None:
    found = plain(value)
    assert found == expected and type(found) is type(expected)
    json.dumps(found, ensure_ascii=False, allow_nan=False).encode()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("-inf", -math.inf),
        (True, None),
        ("1", None),
    ],
)
def test_a_number_of_a_record_is_read_back_and_nothing_else_is(value: Any, expected: float | None) -> None:
    found = as_float(value)
    assert found == expected and (found is None or type(found) is float)
    assert math.isnan(as_float("nan") or 0.0)
