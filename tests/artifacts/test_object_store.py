"""What a store's errors mean, without a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.artifacts.object_store import FsspecBackend
from nemotron_steps.errors import StorageError, StorageUnreachableError


class Refused(OSError):
    """botocore's, which keep what the server said."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.response = {"ResponseMetadata": {"HTTPStatusCode": status}}


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (429, StorageUnreachableError),
        (500, StorageUnreachableError),
        (503, StorageUnreachableError),
        (403, StorageError),
        (416, StorageError),
    ],
)
def test_a_server_that_is_busy_may_answer_later_and_one_that_refuses_will_not(
    status: int, kind: type[StorageError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = FsspecBackend("memory://home", tmp_path)

    def refuse(path: str) -> Any:
        raise Refused(status)

    monkeypatch.setattr(backend._fs, "cat_file", refuse)
    with pytest.raises(StorageError) as caught:
        backend.read("artifacts/x")
    assert type(caught.value) is kind and caught.value.where == "memory://home/artifacts/x"
