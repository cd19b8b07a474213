"""The TensorBoard mirror: what it wrote is read back record by record from its event files."""

import struct
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.config.profiles import MirrorSettings, TensorBoardSettings
from tests.runs.runner_toy_plan import run

pytest.importorskip("tensorboardX")

HERE = MirrorSettings(tensorboard=TensorBoardSettings())


def values(folder: Path) -> dict[str, list[tuple[int, Any]]]:
    """Tag → (index, number or text) of every event file of a folder (TFRecord: length, its checksum, data, its own)."""
    from tensorboardX.proto.event_pb2 import Event

    found: dict[str, list[tuple[int, Any]]] = {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        data, offset = path.read_bytes(), 0
        while offset < len(data):
            (length,) = struct.unpack_from("<Q", data, offset)
            event = Event.FromString(data[offset + 12 : offset + 12 + length])
            offset += 16 + length
            for value in event.summary.value:
                is_text = value.HasField("tensor")
                read = value.tensor.string_val[0].decode() if is_text else value.simple_value
                found.setdefault(value.tag, []).append((event.step, read))
    return found


def test_event_files_have_metrics_summary_and_samples(store: ArtifactStore) -> None:
    result = run(store, mirrored=HERE, make={"api_key": "sk-not-for-tensorboard"}, train={"fail": "signal"})
    found = values(result.folder / "tensorboard" / "toy" / "train")
    assert [index for index, _ in found["sum"]] == list(range(1, 11))
    assert found["sum"][-1] == (10, 285.0)
    assert found["loss"][1] == (2, 0.5)
    assert found["summary/sum/after"] == [(10, 285.0)]
    assert found["summary/steps"] == [(10, 10.0)]
    (text,) = found["samples/text_summary"]
    assert text[0] == 10 and "    <b>4</b>" in text[1]
    assert found["signals/text_summary"][-1] == (5, "**kl_spike** kl=0.9123456, step=6")
    for path in (result.folder / "tensorboard").rglob("*"):
        assert not path.is_file() or b"sk-not-for-tensorboard" not in path.read_bytes(), path


def test_a_writer_that_raises_an_error_of_its_own_does_not_stop_the_run(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tensorboardX

    class NoCredentialsError(Exception):
        pass

    def refuse(*_: Any) -> None:
        raise NoCredentialsError("Unable to locate credentials")

    monkeypatch.setattr(tensorboardX.SummaryWriter, "close", refuse)
    result = run(store, mirrored=HERE)
    assert result.step("toy/train").outputs
    log = (result.folder / "log.txt").read_text()
    assert (
        "the TensorBoard mirror stops here, the run goes on: Unable to locate credentials (NoCredentialsError)" in log
    )
