"""Files of the cache folder that are broken, and variables of a launcher that are taken away for a while."""

import os
from pathlib import Path

import pytest

from nemotron_steps.config.locations import of_launcher, read_json, variables_set


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b'{"rows":', b"[" * 200_000, b"1" * 5000])
def test_what_is_no_json_counts_as_missing(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "index.json").write_bytes(content)
    assert read_json(tmp_path / "index.json") is None
    assert read_json(tmp_path / "missing.json") is None


def test_variables_of_a_launcher_are_told_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_NAME", "NODE_RANK")
    own += ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_ID")
    for name in (*own, "RANKING", "MY_RANK", "SLURM_PROCID", "LOCAL_CACHE", "MASTER_KEY"):
        monkeypatch.setenv(name, "1")
    assert set(of_launcher()) == set(own)
    with variables_set(of_launcher()):
        assert not of_launcher() and os.environ["SLURM_PROCID"] == "1"
    assert os.environ["RANK"] == "1"
