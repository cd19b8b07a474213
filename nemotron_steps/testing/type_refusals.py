"""Checks of what an artifact type's validator does not take: it says so with a code, where, and what is right."""

from __future__ import annotations

from pathlib import Path

from nemotron_steps.errors import ArtifactError, DataError, StepsError
from nemotron_steps.testing.samples import write_sample
from nemotron_steps.testing.suite import Suite, Unmet
from nemotron_steps.testing.type_subject import TypeSubject, changed, files_of

_OTHERS = ("training_jsonl", "rl_prompts", "eval_report")
_PICTURE = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\xff\xfe" * 8
_LONG = 2000
"""Characters of an error that still can be read."""

REFUSAL_SUITE: Suite[TypeSubject] = Suite()


@REFUSAL_SUITE.check("its_example_is_accepted")
def an_empty_folder_is_refused(subject: TypeSubject) -> None:
    """A folder without files."""
    empty = subject.folder / "empty"
    empty.mkdir()
    _refused(subject, empty, "an empty folder")


@REFUSAL_SUITE.check("its_example_is_accepted")
def a_missing_file_is_refused(subject: TypeSubject) -> None:
    """A folder with none of its own files, but another one."""
    folder = subject.folder / "stranger"
    folder.mkdir()
    (folder / "kit.unknown").write_text("another file\n")
    _refused(subject, folder, "a folder without its files")


@REFUSAL_SUITE.check("its_example_is_accepted")
def empty_files_are_refused(subject: TypeSubject) -> None:
    """Files of no bytes: what a full disk leaves."""
    _refused(subject, changed(subject, "no-bytes", lambda data: b""), "files of no bytes")


@REFUSAL_SUITE.check("its_example_is_accepted")
def truncated_files_are_refused(subject: TypeSubject) -> None:
    """Files that end in the middle."""
    folder = changed(subject, "cut", lambda data: data[: max(1, len(data) * 2 // 3 - 3)])
    _refused(subject, folder, "truncated files")


@REFUSAL_SUITE.check("its_example_is_accepted")
def other_bytes_are_refused(subject: TypeSubject) -> None:
    """Files of its names that are pictures."""
    _refused(subject, changed(subject, "pictures", lambda data: _PICTURE), "files that are pictures")


@REFUSAL_SUITE.check("its_example_is_accepted")
def other_types_are_refused(subject: TypeSubject) -> None:
    """Artifacts of the built-in types that it is not."""
    for name in _OTHERS:
        if subject.registry.types.is_a(name, subject.name) or name in (subject.name, *subject.ancestors):
            continue
        sample = write_sample(name, subject.folder / f"other-{name}")
        assert sample is not None
        _refused(subject, sample, f"a {name}")


@REFUSAL_SUITE.check("its_example_is_accepted")
def deeply_nested_files_do_no_harm(subject: TypeSubject) -> None:
    """A hundred thousand brackets, on which parsers of JSON and YAML run out of stack, are refused or are text."""
    folder = changed(subject, "nested", lambda data: b"[" * 100_000)
    try:
        subject.validated(folder)
    except StepsError:
        return
    except Exception as error:
        raise Unmet(
            f"files of brackets: the validator raises {type(error).__name__}",
            hint="except (ValueError, RecursionError) as error: raise DataError(…) from error",
        ) from error


@REFUSAL_SUITE.check("its_example_is_accepted")
def folders_in_place_of_files_are_refused(subject: TypeSubject) -> None:
    """Folders with the names of its files."""
    folder = subject.written("folders")
    for file in list(files_of(folder)):
        file.unlink()
        file.mkdir()
    _refused(subject, folder, "folders in place of files")


@REFUSAL_SUITE.check("its_example_is_accepted")
def dangling_links_are_refused(subject: TypeSubject) -> None:
    """Links to files that are gone, as a cache that was cleaned leaves them."""
    folder = subject.written("dangling")
    for file in list(files_of(folder)):
        file.unlink()
        file.symlink_to(subject.folder / "gone")
    _refused(subject, folder, "links to nowhere")


@REFUSAL_SUITE.check("its_example_is_accepted")
def a_file_for_the_folder_is_told(subject: TypeSubject) -> None:
    """The path of one of its files, which users give as well, is taken or refused with a code."""
    for file in list(files_of(subject.written("files"))):
        try:
            subject.validated(file)
        except StepsError:
            continue
        except Exception as error:
            raise Unmet(
                f"given {file.name} itself, the validator raises {type(error).__name__}: {error}",
                hint="if not folder.is_dir(): raise ArtifactError(…, expected='a folder')",
            ) from error


@REFUSAL_SUITE.check("an_empty_folder_is_refused", "other_bytes_are_refused")
def errors_point_into_the_folder(subject: TypeSubject) -> None:
    """`where` is the path of a file or folder of the artifact, as it was given."""
    for folder, error in _two_errors(subject, "point"):
        if not (error.where or "").startswith(str(folder)):
            raise Unmet(
                "the error does not say in which folder", found=f"{error.what}: {error.where}", hint="where=str(file)"
            )


@REFUSAL_SUITE.check("an_empty_folder_is_refused", "other_bytes_are_refused")
def errors_say_what_is_right(subject: TypeSubject) -> None:
    """An error says what was expected, or has a hint."""
    for _, error in _two_errors(subject, "right"):
        if not error.expected and not error.hints:
            raise Unmet("an error says only what is wrong", found=error.what, hint="expected='…', or hints=('…',)")


@REFUSAL_SUITE.check("its_example_is_accepted")
def errors_are_short(subject: TypeSubject) -> None:
    """An error about a large file does not print the file."""
    text = b"kit " * 20_000
    long = (text, b'"' + text + b'"', b'{"kit": "' + text + b'"}', b'{"' + text + b'": 1}')
    for index in range(len(long)):
        folder = subject.written(f"long-{index}")
        for file in files_of(folder):
            file.write_bytes(long[index])
        try:
            subject.validated(folder)
        except StepsError as error:
            said = "".join(str(part or "") for part in (error.what, error.expected, error.found, *error.hints))
            if len(said) > _LONG:
                raise Unmet(
                    f"an error of {len(said)} characters", found=f"{said[:100]}…", hint="found=repr(value)[:80]"
                ) from error


def _two_errors(subject: TypeSubject, name: str) -> list[tuple[Path, StepsError]]:
    """What the validator says of an empty folder, and of pictures."""
    empty = subject.folder / f"{name}-empty"
    empty.mkdir()
    found: list[tuple[Path, StepsError]] = []
    for folder in (empty, changed(subject, f"{name}-pictures", lambda data: _PICTURE)):
        try:
            subject.validated(folder)
        except StepsError as error:
            found.append((folder, error))
    return found


def _refused(subject: TypeSubject, folder: Path, kind: str) -> None:
    try:
        subject.validated(folder)
    except (ArtifactError, DataError) as error:
        if not error.where:
            raise Unmet(f"{kind}: the error does not say where", found=error.what, hint="where=str(file)") from error
    except Exception as error:
        raise Unmet(
            f"{kind}: the validator raises {type(error).__name__}: {error}",
            hint="raise ArtifactError or DataError(what, where=…, expected=…, found=…)",
        ) from error
    else:
        raise Unmet(
            f"{kind}: the validator accepts it",
            hint="look for what every such artifact has: a field, a count of rows, an end mark",
        )
