"""Tiny hybrids on disk."""

import pytest

from tests.models.hybrid_twins import write_hybrid


@pytest.fixture(scope="session")
def hybrid_folders(tmp_path_factory):
    """Name of a twin → its checkpoint folder, written once."""
    root = tmp_path_factory.mktemp("hybrid")
    folders = {}

    def folder(name):
        if name not in folders:
            folders[name] = root / name
            write_hybrid(name, folders[name], initializer_range=0.1)
        return folders[name]

    return folder
