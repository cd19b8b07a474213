"""The artifact type `word_counts`: a folder with counts.json, word → how often it occurs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nemotron_steps.errors import ArtifactError, DataError

FILE = "counts.json"


def validate(folder: Path) -> dict[str, Any]:
    """Check a folder; returns its attributes. ArtifactError or DataError say what is wrong with it."""
    file = folder / FILE
    if not file.is_file():
        raise ArtifactError("there are no counts", where=str(folder), expected=FILE)
    try:
        counts = json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError("the counts are no JSON", where=str(file), expected="JSON", found=str(error)[:200]) from error
    if not isinstance(counts, dict) or not counts:
        raise DataError("there is no word in the counts", where=str(file), expected="an object: word → number")
    wrong = [word for word, count in counts.items() if type(count) is not int or count < 1]
    if wrong:
        raise DataError(f"the count of '{wrong[0]}' is no positive number", where=str(file))
    return {"words": sum(counts.values()), "different_words": len(counts)}
