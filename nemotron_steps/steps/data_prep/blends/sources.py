"""What a source stands for: data files, on this machine, at an address that fsspec opens, or on the hub."""

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from nemotron_steps.artifacts.files import licence_in
from nemotron_steps.artifacts.models import MANIFEST_NAME
from nemotron_steps.errors import DataError, RetryableError, StepsError, first_line
from nemotron_steps.waiting import waiting

_NAME = re.compile(
    r"(?P<scheme>hf://(?:datasets/)?)?"
    r"(?P<repository>[\w.-]+/[\w.-]+)"
    r"(?:@(?P<revision>[\w.-]+))?"
    r"(?:/(?P<file>[^@]+))?"
)


@dataclass(frozen=True)
class HubName:
    """hf://ORG/NAME@REVISION/FILE."""

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
    """Fetch the data files of a hub data set, those that are not here yet, and return where they are."""
    from huggingface_hub import errors, snapshot_download

    patterns = [f"*{suffix}" for suffix in suffixes]
    if name.file:
        patterns = [name.file, *(f"{name.file.rstrip('/')}/{pattern}" for pattern in patterns)]
    else:
        patterns += ["*.arrow", "*dataset_info.json", "*dataset_dict.json", "*state.json"]
    patterns, where, repository = [*patterns, "README.md"], f"{key} = {name.repository}", name.repository
    mirror = "mirror=FOLDER   # with ORG/NAME folders in it, as `hf download --local-dir FOLDER/ORG/NAME` makes them"
    try:
        with waiting(f"the hub to send {repository}"):
            root = snapshot_download(repository, repo_type="dataset", revision=name.revision, allow_patterns=patterns)
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.GatedRepoError) as error:
        what, hints = "the hub has no such data set, or none that this user may read", ("hf auth login", mirror)
        raise DataError(what, where=where, found=type(error).__name__, hints=hints) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, errors.HfHubHTTPError, OSError) as error:
        raise RetryableError(
            "the data set could not be fetched: the hub does not answer",
            where=where,
            found=f"{type(error).__name__}: {first_line(error)}",
            hints=(mirror, "export HF_ENDPOINT=https://YOUR_HUB"),
        ) from error
    folder = Path(root) / name.file
    if not folder.exists():
        there = ", ".join(sorted(path.name for path in Path(root).iterdir())[:8])
        what, hint = f"the data set has no '{name.file}'", f"input_path=hf://{repository}"
        raise DataError(what, where=where, found=there or "no data files", hints=(hint,))
    return folder


Kind = Literal["jsonl", "gzip", "parquet", "arrow", "csv", "list"]

SUFFIXES: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".jsonl.gz": "gzip",
    ".ndjson.gz": "gzip",
    ".json.gz": "gzip",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
}
_MAGIC: dict[bytes, Kind] = {b"\x1f\x8b": "gzip", b"PAR1": "parquet"}
_START = 64
_SPLIT_NAMES = re.compile(r"train|training|validation|valid|val|dev|test|testing|eval|evaluation", re.IGNORECASE)
_WORD = re.compile(r"[/._-]")


@dataclass(frozen=True)
class DataFile:
    """One file of rows."""

    path: str
    name: str
    kind: Kind
    size: int
    stamp: str

    @property
    def place(self) -> str:
        """The path as records and messages have it."""
        return without_signature(self.path)


def without_signature(address: str) -> str:
    """An address without what is behind its question mark, which opens it to whoever reads it; a path as it is."""
    return address.partition("?")[0] if address.startswith(("http://", "https://")) else address


def data_files(
    path: str, *, key: str, split: str | None = None, subset: str | None = None, mirror: str | None = None
) -> list[DataFile]:
    """The files of a source in name order."""
    local = Path(path).expanduser()
    name = hub_name(path) if not local.exists() else None
    if name is not None:
        root = hub_folder(name, key, tuple(SUFFIXES)) if mirror is None else _mirrored(name, key, mirror)
        files = _below(root, key)
    elif "://" in path:
        files = _remote(path, key)
    else:
        files = _below(local, key)
    if subset is not None:
        chosen = [file for file in files if _has_words(file.name, subset)]
        if not chosen:
            raise _none_of("subset", subset, files, key)
        files = chosen
    if split is None:
        return files
    chosen = [file for file in files if _has_words(file.name, split)]
    words = [word for file in files for word in _WORD.split(file.name)]
    # Where no file's name tells a split, all of them are `train`; a file that was named itself is of any split.
    untold = split == "train" and not any(map(_SPLIT_NAMES.fullmatch, words))
    if not chosen and (untold or (len(files) == 1 and Path(path).name == files[0].name)):
        return files
    if not chosen:
        raise _none_of("split", split, files, key)
    return chosen


def licence_of(path: str, mirror: str | None = None) -> str:
    """What a source's README.md says of its licence, once its files were fetched; empty if nothing does."""
    local, name = Path(path).expanduser(), hub_name(path)
    if name is None or local.exists():
        return licence_in(local if local.is_dir() else local.parent)
    if mirror is not None:
        return licence_in(Path(mirror).expanduser() / name.repository)
    from huggingface_hub import try_to_load_from_cache

    card = try_to_load_from_cache(name.repository, "README.md", repo_type="dataset", revision=name.revision)
    return licence_in(Path(card).parent) if isinstance(card, str) else ""


def _mirrored(name: HubName, key: str, mirror: str) -> Path:
    copy = Path(mirror).expanduser() / name.repository
    root = copy / name.file
    if not root.exists():
        fetch = f"hf download {name.repository} --repo-type dataset --local-dir {shlex.quote(str(copy))}"
        what = f"the mirror has no copy of the data set {name.repository}"
        raise DataError(what, where=key, expected=str(root), found="nothing there", hints=(fetch, "mirror=null"))
    return root


def _below(root: Path, key: str) -> list[DataFile]:
    if root.is_file():
        return [_local(root, root.name, _kind_of_file(root))]
    saved = list(_saved(root))
    if saved:
        return [_local(file, file.relative_to(root).as_posix(), "arrow") for file in saved]
    files = []
    for file in sorted(root.rglob("*")):
        kind = _kind_of_name(file.name)
        if kind is not None and file.is_file():
            files.append(_local(file, file.relative_to(root).as_posix(), kind))
    alone = [file for file in root.rglob("*.json") if file.name != MANIFEST_NAME]
    if not files and len(alone) == 1:  # a list that was named by hand, in the home
        files = [_local(alone[0], alone[0].name, _kind_of_file(alone[0]))]
    if not files:
        raise _nothing(str(root), key)
    return files


def _saved(root: Path) -> Iterator[Path]:
    """The files of a folder that `datasets` saved: one data set, or one in a folder for each split."""
    splits = root / "dataset_dict.json"
    if splits.is_file():
        for split in json.loads(splits.read_text())["splits"]:
            yield from _saved(root / split)
    elif (root / "state.json").is_file() and (root / "dataset_info.json").is_file():
        for file in json.loads((root / "state.json").read_text())["_data_files"]:
            yield root / file["filename"]


def _remote(url: str, key: str) -> list[DataFile]:
    import fsspec

    try:
        file_system, root = fsspec.core.url_to_fs(url)
        # What is signed has its signature behind a question mark: no part of its name, and no folder has one.
        plain = without_signature(root)
        found: Mapping[str, Mapping[str, object]] = {}
        # Over HTTP, `find` would fetch the whole file to look for links.
        if _kind_of_name(plain) is not None or plain != root:
            info = file_system.info(root)
            found = {root: info} if info["type"] == "file" else {}
        with waiting(f"a list of the files at {plain}"):
            found = found or file_system.find(root, detail=True)
        if not found:  # a server without folders, or that does not answer: `exists` would call that nothing
            found = {root: {}}
        files = []
        for path, info in sorted(found.items()):
            name = PurePosixPath(path).relative_to(root).as_posix() if path != root else PurePosixPath(plain).name
            kind = _kind_of_name(name)
            if kind is None and path == root:
                with suppress(IsADirectoryError), file_system.open(path, "rb") as opened:
                    kind = _kind_of_start(name, bytes(opened.read(_START)))
            if kind is not None:
                told = info if info.get("size") is not None else file_system.info(path)
                if told["size"] is None:
                    raise ValueError(f"the server does not say how large {path} is")
                size = int(str(told["size"]))
                address = file_system.unstrip_protocol(path)
                files.append(DataFile(address, name, kind, size, f"{size}-{file_system.ukey(path)}"))
    except (ImportError, ValueError) as error:
        raise DataError(
            "the address cannot be opened",
            where=key,
            found=str(error),
            hints=("input_path=s3://BUCKET/FOLDER", "input_path=https://HOST/FILE.jsonl"),
        ) from error
    except Exception as error:  # every file system has errors of its own
        if not is_missing(error):
            raise unreachable(url, key, error) from error
        files = []
    if not files:
        raise _nothing(url, key)
    return files


def is_missing(error: Exception) -> bool:
    """Whether an error says that there is nothing at the address."""
    error = _behind(error)
    return isinstance(error, FileNotFoundError) or getattr(error, "status", None) in (404, 410)


def _behind(error: Exception) -> Exception:
    """Over HTTP, fsspec calls every failure a missing file: what it was."""
    from aiohttp import ClientError

    cause = error.__cause__
    known = isinstance(error, FileNotFoundError) and isinstance(cause, ClientError | TimeoutError)
    return cause if known and isinstance(cause, Exception) else error


def unreachable(path: str, key: str, error: Exception) -> StepsError:
    """The error for a server that does not answer, or refuses."""
    error, where = _behind(error), f"{key} = {path}" if key else path
    refused = isinstance(error, PermissionError) or getattr(error, "status", None) in (401, 403)
    if refused or type(error).__name__ == "NoCredentialsError":  # botocore's
        copy = f"curl -fLO {shlex.quote(path)}   # with the credentials it asks for; then give the copy's path"
        hint = "export AWS_PROFILE=NAME" if path.startswith("s3://") else copy
        what = "the server does not let this user read the data"
        return DataError(what, where=where, found=first_line(error), hints=(hint,))
    found, hint = f"{type(error).__name__}: {first_line(error)}", "run the same command again: finished shards are kept"
    return RetryableError("the data could not be fetched", where=where, found=found, hints=(hint,))


def _has_words(name: str, words: str) -> bool:
    """Whether the words stand whole in a file's name: `math` in data/math-00000-of-00001.parquet."""
    return re.search(rf"(^|[/._-]){re.escape(words)}($|[/._-])", name) is not None


def _none_of(what: str, wanted: str, files: Sequence[DataFile], key: str) -> DataError:
    return DataError(
        f"the source has no {what} '{wanted}'",
        where=key,
        found=", ".join(file.name for file in files[:8]) + (" ..." if len(files) > 8 else ""),
        hints=(f'"{what}": null   # in the blend file: every file that `found` names',),
    )


def _nothing(path: str, key: str) -> DataError:
    return DataError(
        "no JSON Lines data at the given path",
        where=key,
        expected="a file or folder of *.jsonl, *.jsonl.gz, *.parquet or *.csv, or a folder that `datasets` saved",
        found=path,
        hints=(f"{key}=FILE.jsonl", *(("--input source=FILE.jsonl",) if key == "jsonl.path" else ())),
    )


def _local(path: Path, name: str, kind: Kind) -> DataFile:
    status = os.stat(path)
    return DataFile(str(path), name, kind, status.st_size, f"{status.st_size}-{status.st_mtime_ns}")


def _kind_of_name(name: str) -> Kind | None:
    return next((kind for suffix, kind in SUFFIXES.items() if name.endswith(suffix)), None)


def _kind_of_file(path: Path) -> Kind:
    with path.open("rb") as file:
        return _kind_of_start(path.name, file.read(_START))


def _kind_of_start(name: str, start: bytes) -> Kind:
    suffix = PurePosixPath(name).suffix.lower()
    start = start.lstrip()
    by_name: Kind = "csv" if suffix in (".csv", ".tsv") else "jsonl"
    if suffix in ("", ".json") and start.startswith(b"["):
        by_name = "list"
    return next((kind for magic, kind in _MAGIC.items() if start.startswith(magic)), by_name)
