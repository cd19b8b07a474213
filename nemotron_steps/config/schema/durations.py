"""Durations as job schedulers write them."""

from __future__ import annotations


def parse_duration(text: str) -> float:
    """Seconds in HH:MM, HH:MM:SS or DD:HH:MM:SS.

    Raises:
        ValueError: it is none of these, or has more than 59 minutes or seconds, or 23 hours beside days.
    """
    parts = text.split(":")
    if len(parts) in (2, 3, 4) and all(part.isdecimal() for part in parts):
        numbers = [int(part) for part in parts]
        days = numbers.pop(0) if len(numbers) == 4 else 0
        hours, minutes, seconds = (*numbers, 0)[:3]
        if minutes < 60 and seconds < 60 and (hours < 24 or len(parts) < 4):
            return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    raise ValueError(f"not a duration of the form HH:MM, HH:MM:SS or DD:HH:MM:SS: {text}")


def is_duration(text: str) -> bool:
    """Whether `parse_duration` reads it."""
    try:
        parse_duration(text)
    except ValueError:
        return False
    return True
