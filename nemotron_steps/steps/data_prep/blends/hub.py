"""Data sets of the Hugging Face hub: their names, and a folder of this machine with their files.

The library's own settings hold: HF_HOME (where files are kept), HF_ENDPOINT, HF_HUB_OFFLINE, HF_TOKEN.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from nemotron_steps.errors import DataError, RetryableError
from nemotron_steps.waiting import waiting

_NAME = re.compile(
    r"(?P<scheme>hf://(?:datasets/)?)?"
    r"(?P<repository>[\w.-]+/[\w.-]+)"
    r"(?:@(?P<revision>[\w.-]+))?"
    r"(?:/(?P<file>[^@]+))?"
)


@dataclass(frozen=True)
class HubName:
    """hf://ORG/NAME@REVISION/FILE.

    Attributes:
        repository: ORG/NAME.
        revision: None for the newest.
        file: a file or folder of it; "" for all.
    """

    repository: str
    revision: str | None = None
    file: str = ""


def hub_name(path: str) -> HubName | None:
    """The hub data set that a path means: with hf:// before it, or ORG/NAME alone."""
    match = _NAME.fullmatch(path)
    if match is None or path.startswith((".", "/", "~")):
        return None
    if match["scheme"] is None and (match["file"] is not None or path.endswith((".jsonl", ".gz", ".parquet", ".json"))):
        return None  # a relative path
    return HubName(match["repository"], match["revision"], match["file"] or "")


def hub_folder(name: HubName, key: str, suffixes: tuple[str, ...]) -> Path:
    """Fetch the data files of a hub data set, those that are not here yet, and return where they are.

    Raises:
        DataError: there is no such data set, revision or file, or it is closed to this user.
        RetryableError: the hub does not answer and this machine has no copy.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    patterns = [f"*{suffix}" for suffix in suffixes]
    if name.file:
        patterns = [name.file, *(f"{name.file.rstrip('/')}/{pattern}" for pattern in patterns)]
    else:
        patterns += ["*.arrow", "*dataset_info.json", "*dataset_dict.json", "*state.json"]
    where = f"{key} = {name.repository}"
    mirror = "mirror=FOLDER   # with ORG/NAME folders in it, as `hf download --local-dir FOLDER/ORG/NAME` makes them"
    try:
        with waiting(f"the hub to send {name.repository}"):
            root = snapshot_download(
                name.repository, repo_type="dataset", revision=name.revision, allow_patterns=patterns
            )
    except (RepositoryNotFoundError, RevisionNotFoundError, GatedRepoError) as error:
        raise DataError(
            "the hub has no such data set, or none that this user may read",
            where=where,
            found=type(error).__name__,
            hints=("hf auth login", mirror),
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, OSError) as error:
        raise RetryableError(
            "the data set could not be fetched: the hub does not answer",
            where=where,
            expected="a hub that can be reached from here, or a copy on this machine",
            found=f"{type(error).__name__}: {(str(error).splitlines() or ['no answer'])[0]}",
            hints=(mirror, "export HF_ENDPOINT=https://YOUR_HUB"),
        ) from error
    folder = Path(root) / name.file
    if not folder.exists():
        raise DataError(
            f"the data set has no '{name.file}'",
            where=where,
            found=", ".join(sorted(path.name for path in Path(root).iterdir())[:8]) or "no data files",
            hints=(f"input_path=hf://{name.repository}",),
        )
    return folder
