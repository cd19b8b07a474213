"""Sequence packing: which sequences share a row, so that no compute goes to padding.

Where they lie in the row, and how attention keeps them apart, is the policy's business (policy/layout.py).
"""

from bisect import bisect_right, insort
from collections.abc import Sequence


def pack(algorithm: str, sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Item indices of each bin by one of ALGORITHMS."""
    return ALGORITHMS[algorithm](sizes, capacity)


def concatenative(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """In the order given: a bin is closed by the first item that it has no room for."""
    bins: list[list[int]] = []
    room = 0
    for item, size in enumerate(sizes):
        if not bins or size > room:
            bins.append([])
            room = capacity
        bins[-1].append(item)
        room -= size
    return bins


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Longest first, each into the first bin with room. At most 11/9 of the optimum plus 6/9 of a bin."""
    bins: list[list[int]] = []
    room: list[int] = []
    for item in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        size = sizes[item]
        target = next((b for b, free in enumerate(room) if free >= size), None)
        if target is None:
            bins.append([item])
            room.append(capacity - size)
        else:
            bins[target].append(item)
            room[target] -= size
    return bins


def modified_first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Johnson and Garey's MFFD (J. Complexity 1, 1985), at most 71/60 of the optimum plus one bin; or plain first fit
    decreasing, where that needs fewer bins.

    Items above half the capacity open a bin each, longest first. Then, from the fullest bin to the emptiest, each takes
    the largest medium item (above a third) that fits; from the emptiest back, bins without a medium item take a pair of
    small ones (above a sixth); then every bin is filled with the largest items that fit; what is left is packed first
    fit decreasing.
    """
    # (size, -index) ascending: the last entry is the largest, and among equals the one that came first.
    ascending = sorted((size, -index) for index, size in enumerate(sizes))
    large = [entry for entry in reversed(ascending) if 2 * entry[0] > capacity]
    medium = [entry for entry in ascending if 2 * entry[0] <= capacity < 3 * entry[0]]
    small = [entry for entry in ascending if 3 * entry[0] <= capacity < 6 * entry[0]]
    tiny = [entry for entry in ascending if 6 * entry[0] <= capacity]
    bins = [[-index] for _, index in large]
    room = [capacity - size for size, _ in large]

    def put(target: int, pool: list[tuple[int, int]], position: int) -> None:
        size, index = pool.pop(position)
        bins[target].append(-index)
        room[target] -= size

    for target in range(len(bins)):
        position = _largest_that_fits(medium, room[target])
        if position is not None:
            put(target, medium, position)
    for target in reversed(range(len(bins))):
        # Beside a medium item less than a sixth is left, and no small one fits.
        if len(small) < 2 or small[0][0] + small[1][0] > room[target]:
            continue
        put(target, small, 0)
        position = _largest_that_fits(small, room[target])
        assert position is not None  # the second smallest fits
        put(target, small, position)
    rest: list[tuple[int, int]] = []
    for pool in (tiny, small, medium):
        for entry in pool:
            insort(rest, entry)
    for target in range(len(bins)):
        while (position := _largest_that_fits(rest, room[target])) is not None:
            put(target, rest, position)
    left = [-index for _, index in rest]
    for packed in first_fit_decreasing([sizes[i] for i in left], capacity):
        bins.append([left[i] for i in packed])
    plain = first_fit_decreasing(sizes, capacity)
    return plain if len(plain) < len(bins) else bins


def _largest_that_fits(ascending: list[tuple[int, int]], room: int) -> int | None:
    """Position of the largest entry of at most `room`, None without one."""
    position = bisect_right(ascending, (room, 1)) - 1
    return position if position >= 0 else None


ALGORITHMS = {
    "modified_first_fit_decreasing": modified_first_fit_decreasing,
    "first_fit_decreasing": first_fit_decreasing,
    "concatenative": concatenative,
}
"""`policy.sequence_packing.algorithm` → how items are packed into bins."""
