"""The folder of pipeline files: what changed in it, and the last good version of each bad file."""

import errno
from collections.abc import Mapping
from pathlib import Path
from stat import S_ISDIR, S_ISREG

import msgspec

from oraculo.errors import Fault, InvalidPipeline
from oraculo.pipeline.definition import Definition
from oraculo.pipeline.queue_rules import QueueRules
from oraculo.pipeline.retry import RetryPolicy
from oraculo.pipeline.text import MAX_TEXT, expect_length, read_pipeline

_SUFFIXES = frozenset({".yaml", ".yml", ".json"})

_Mark = tuple[int, int] | str  # when a file was changed last, and its size; or why it cannot be read


class BadFile(msgspec.Struct, frozen=True):
    """A pipeline file that cannot be used as it is now."""

    file: str  # its name in the folder; empty: the folder itself
    pipeline: str  # the name that it defines; the file's own name without its suffix where that cannot be read
    faults: tuple[Fault, ...]
    in_use: bool  # whether its last good version is used

    @property
    def reason(self) -> str:
        return "; ".join(map(str, self.faults))

    def __str__(self) -> str:
        file = self.file or "the pipelines folder"
        return f"{file} is not used{' and its last good version is' if self.in_use else ''}: {self.reason}"


class FolderContents(msgspec.Struct, frozen=True):
    """The pipelines of the folder, and its bad files."""

    definitions: Mapping[str, Definition] = {}
    bad: tuple[BadFile, ...] = ()


class PipelineFolder:
    """The reader of the folder. One bad file keeps no other from being used."""

    def __init__(self, folder: Path, default_retry: RetryPolicy, default_timeout: float, queues: QueueRules) -> None:
        self._folder = folder
        self._queues = queues
        self._default_retry = default_retry
        self._default_timeout = default_timeout
        self._seen: dict[Path, _Mark] | None = None
        self._read: dict[Path, tuple[_Mark, Definition | InvalidPipeline]] = {}
        self._used: dict[Path, Definition] = {}
        self._contents = FolderContents()

    def look(self) -> FolderContents | None:
        """Return what is in the folder now, or None when nothing changed since the last look.

        Raise InvalidPipeline when the first look cannot read the folder itself.
        """
        before = self._contents
        try:
            paths = pipeline_files(self._folder)
        except InvalidPipeline as error:
            if self._seen is None:
                raise
            self._seen = {self._folder: ""}  # no look at its files compares equal to it
            others = tuple(bad for bad in before.bad if bad.file)
            self._contents = FolderContents(before.definitions, (BadFile("", "", error.faults, in_use=True), *others))
            return self._contents if self._contents != before else None
        marks = {path: self._mark_of(path) for path in paths}
        if marks == self._seen:
            return None
        self._seen = marks
        self._read = {path: read for path, read in self._read.items() if read[0] == marks.get(path)}
        for path in paths:
            if path not in self._read:
                read = self._read_file(path)
                self._read[path] = marks[path], read
        self._contents = self._assembled()
        return self._contents

    def _mark_of(self, path: Path) -> _Mark:
        """Return what changes when a file changes.

        A file that could not be read is opened again, because its time and size may stay the same when it can be.
        """
        try:
            if isinstance((self._seen or {}).get(path), str):
                expect_regular(path)
                _read_bounded(path)
            stat = path.stat()
        except OSError as error:
            return str(error.strerror)
        return stat.st_mtime_ns, stat.st_size

    def _read_file(self, path: Path) -> Definition | InvalidPipeline:
        try:
            expect_regular(path)
            return read_pipeline(
                pipeline_bytes(path),
                default_retry=self._default_retry,
                default_timeout=self._default_timeout,
                queue_fault=self._queues.step_fault,
            )
        except InvalidPipeline as error:
            return error.with_traceback(None)
        except OSError as error:
            assert self._seen is not None
            self._seen[path] = why = str(error.strerror)  # also the mark of what was read
            return InvalidPipeline(Fault("", f"cannot be read: {why}"))

    def _assembled(self) -> FolderContents:
        used: dict[Path, Definition] = {}
        owners: dict[str, Path] = {}
        bad: list[BadFile] = []
        for path in sorted(self._read, key=self._changes_its_name):
            found, last = self._read[path][1], self._used.get(path)
            if isinstance(found, Definition) and (other := owners.get(found.name)) is not None:
                found = InvalidPipeline(Fault("name", f"'{found.name}' is the name of {other.name} already"))
                found.name = other.stem
            if isinstance(found, Definition):
                last = found
            elif last is not None and last.name in owners:
                last = None
            if last is not None:
                used[path], owners[last.name] = last, path
            if isinstance(found, InvalidPipeline):
                name = last.name if last else found.name or path.stem
                bad.append(BadFile(path.name, name, found.faults, in_use=last is not None))
        self._used = used
        return FolderContents({definition.name: definition for definition in used.values()}, tuple(bad))

    def _changes_its_name(self, path: Path) -> tuple[bool, Path]:
        """Return a sort key: of two files with one name, the one that had it before keeps it."""
        found, last = self._read[path][1], self._used.get(path)
        return last is None or (isinstance(found, Definition) and found.name != last.name), path


def pipeline_files(folder: Path) -> list[Path]:
    """Return the pipeline files of a folder, without the hidden ones of editors.

    Raise InvalidPipeline.
    """
    try:
        return sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES and path.name[0] != ".")
    except OSError as error:
        raise InvalidPipeline(Fault(str(folder), f"the pipelines folder cannot be read: {error.strerror}")) from None


def expect_regular(path: Path) -> None:
    """Raise OSError for what is no file: opening a FIFO waits for its writer, which may never come."""
    mode = path.stat().st_mode
    if not S_ISREG(mode) and not S_ISDIR(mode):  # to open a directory fails by itself
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def pipeline_bytes(path: Path) -> bytes:
    """Return the bytes of a file, or of a FIFO like `<(...)`. Raise OSError, or InvalidPipeline when too long."""
    expect_length(path.stat().st_size)
    return _read_bounded(path)


def _read_bounded(path: Path) -> bytes:
    """Return at most one byte more than is allowed, because a device has no end."""
    with path.open("rb") as file:
        return file.read(MAX_TEXT + 1)
