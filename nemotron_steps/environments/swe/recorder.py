"""Runs in the sandbox, in front of each hidden test module (blinding.py): records what assertions see.

It needs no protection: whoever changes it would have to know the values that it does not know. For Python 3.6 on.
PATH, OPERATIONS (site → operation), TOKENS and CANDIDATES (site or token → values) are put into its globals.
"""

import json
import operator
import os
from typing import Any

PLAIN: Any = (bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict)
KNOWN: Any = globals()
SHARE = 100
"""Different records of one assertion in one test: a loop may make a million."""
LONGEST = {"token": 1 << 18, "value": 1 << 12}
"""Characters of a recorded value that is compared with one outside, and with another recorded one."""
WRITTEN: Any = {"": 0}
length = len  # tests replace built-in functions
HOLD: Any = {
    "==": operator.eq,
    "!=": operator.ne,
    "is": operator.is_,
    "is not": operator.is_not,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda left, right: left in right,
    "not in": lambda left, right: left not in right,
    "has": lambda left, right: right in left,
    "has not": lambda left, right: right not in left,
}


def plain(value: Any, left: Any, depth: int = 0) -> Any:
    """A value of built-in types as JSON, by what it holds and not by what it says of itself."""
    left[0] -= 1
    kind = type(value)
    if value is None or kind is bool:
        return value
    base: Any = next((each for each in kind.__mro__ if each in PLAIN), None)
    if base is None and hasattr(kind, "__index__"):
        return ["i", str(int.__add__(operator.index(value), 0))]
    own = base is None or (kind.__eq__ is not base.__eq__ and kind.__name__ not in ("OrderedDict", "Counter"))
    if own or left[0] < 0 or depth > 50:
        raise ValueError
    if base is int:
        return ["i", str(int.__add__(value, 0))]
    if base in (float, complex):
        return [base.__name__[0], repr(base.__add__(value, 0))]
    if base is str:
        return ["s", str.__str__(value)]
    if base is bytes:
        return ["b", bytes.__getitem__(value, slice(None)).hex()]
    if base is dict:
        return ["d", [[plain(key, left, depth + 1), plain(item, left, depth + 1)] for key, item in dict.items(value)]]
    return [base.__name__, [plain(item, left, depth + 1) for item in base.__iter__(value)]]


def shown(value: Any, operation: str, compared: str) -> Any:
    """["plain", its JSON], or ["opaque", its class]."""
    tried: Any = [lambda: value]
    if operation == "almost":
        tried += [lambda: float(value), lambda: [float(item) for item in value]]
    for attempt in tried:
        try:
            found = ["plain", plain(attempt(), [20000])]
            if length(json.dumps(found)) <= LONGEST[compared]:
                return found
        except Exception:
            continue
    return ["opaque", type(value).__name__]


def holds(operation: str, left: Any, right: Any) -> Any:
    """Whether `left operation right`; None where that raises."""
    try:
        return bool(HOLD[operation](left, right))
    except Exception:
        return None


def record(site: str, left: Any, *right: Any) -> None:
    """Write down what an assertion sees. `right` is what it compares with, where that is in here, or its token."""
    operation = KNOWN["OPERATIONS"].get(site, "is")
    computed = right and not (isinstance(right[0], str) and right[0] in KNOWN["TOKENS"])
    compared = "value" if computed else "token"
    line: Any = [site, os.environ.get("PYTEST_CURRENT_TEST", ""), shown(left, operation, compared)]
    key = site
    if computed:
        line.append(["value", shown(right[0], operation, compared), holds(operation, left, right[0])])
    else:
        key = right[0] if right else site
        line.append(["token", key])
        if line[2][0] == "opaque" and key in KNOWN["CANDIDATES"]:
            line.append([holds(operation, left, other) for other in KNOWN["CANDIDATES"][key]])
    text = json.dumps(line)
    known = WRITTEN.setdefault((line[1], key), set())
    written = sum(map(length, known))
    if text in known or length(known) >= SHARE or (known and (written > 1 << 16 or WRITTEN[""] > 1 << 22)):
        return
    WRITTEN[""] += length(text)
    known.add(text)
    descriptor = os.open(KNOWN["PATH"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(descriptor, (text + "\n").encode())
    finally:
        os.close(descriptor)


class Raises:
    """A block that must raise, and whether it did."""

    def __init__(self, site: str, block: Any, negated: bool) -> None:
        self.site, self.block, self.negated = site, block, negated

    def __enter__(self) -> Any:
        return self.block.__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Any:
        record(self.site, (kind is not None) is not self.negated)
        return self.block.__exit__(kind, error, trace)
