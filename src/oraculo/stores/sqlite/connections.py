"""Connections to one SQLite file: opened, brought up to date, and their errors made ours."""

import errno
import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import msgspec

from oraculo.errors import StoreError, StoreRefuses, StoreUnavailable
from oraculo.stores.sql import migrations

MEMORY = ":memory:"
OLDEST_SQLITE = (3, 35, 0)  # UPDATE … FROM and RETURNING
BUSY_SECONDS = 5.0
_BETWEEN_TRIES = 0.05  # seconds, to have the file alone
WAL_PAGES = 4000


def make_parent(path: str) -> None:
    """For its owner alone: the file has payloads, and the passwords of webhooks. One that is there is left as it is."""
    if path == MEMORY:
        return
    parent = Path(path).parent
    try:
        parent.mkdir(0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StoreUnavailable(f"the folder {parent} of the SQLite file cannot be made: {error}") from error


def open_writer(path: str) -> sqlite3.Connection:
    if sqlite3.sqlite_version_info < OLDEST_SQLITE:
        oldest = ".".join(map(str, OLDEST_SQLITE))
        raise StoreError(f"SQLite {sqlite3.sqlite_version} is too old: Python must be built with {oldest} or newer")
    connection = _connect(path, check_same_thread=False)
    try:
        _keep_a_log(connection)
        connection.execute("PRAGMA synchronous = FULL")
        be_patient(connection, patient=True)
        connection.execute("PRAGMA journal_size_limit = 67108864")
    except BaseException:
        connection.close()
        raise
    return connection


def _keep_a_log(connection: sqlite3.Connection) -> None:
    """SQLite refuses this at once, whatever the busy timeout, while another process does the same to a new file: it
    reads first, and does not wait to write then. It does wait to begin a transaction: until that process is done."""
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if primary_code(error) != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
        with Transaction(connection):
            pass


def be_patient(connection: sqlite3.Connection, *, patient: bool) -> None:
    """Whether a commit may wait for another process, and fold the WAL into the file: not in the event loop's thread."""
    connection.execute(f"PRAGMA busy_timeout = {int(BUSY_SECONDS * 1000) if patient else 0}")
    connection.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES if patient else 0}")


def is_older_file(path: str) -> bool:
    """Whether a start would bring it up to date. Changes nothing; one that cannot be read is told by a start."""
    try:
        with closing(open_reader(path)) as connection:
            return _is_older(connection)
    except sqlite3.Error:
        return False


def open_reader(path: str) -> sqlite3.Connection:
    return _connect(f"file:{quote(path)}?mode=ro", uri=True)


def _connect(
    address: str, *, timeout: float | None = None, uri: bool = False, check_same_thread: bool = True
) -> sqlite3.Connection:
    connection = sqlite3.connect(
        address,
        timeout=BUSY_SECONDS if timeout is None else timeout,
        isolation_level=None,  # transactions are begun and ended here, not guessed by the module
        cached_statements=256,
        uri=uri,
        check_same_thread=check_same_thread,
    )
    connection.create_function("folded", 1, str.casefold, deterministic=True)
    return connection


def open_up_to_date(path: str) -> tuple[sqlite3.Connection, list[str]]:
    """The writer's connection, and what was done to the file. Several may lay out a new one at once. One that a version
    before made is not changed under whoever uses it, who would meet tables that it does not know."""
    connection, done = open_writer(path), list[str]()
    try:
        if _is_older(connection):
            connection.close()
            done = _migrated_alone(path)
            connection = open_writer(path)
        return connection, done + _migrate(connection, path, alone=False)
    except BaseException:
        connection.close()
        raise


def _is_older(connection: sqlite3.Connection) -> bool:
    return 0 < _version(connection) < len(migrations("sqlite"))


def _migrated_alone(path: str) -> list[str]:
    """SQLite itself tells whether anybody has the file open, of whatever version: in WAL mode each has a lock on it
    until it closes it or ends. It may have looked in for a moment only, or have started to do the same as this."""
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            with closing(_connect(path, timeout=0)) as connection:
                connection.execute("PRAGMA locking_mode = EXCLUSIVE")
                return _migrate(connection, path, alone=True)
        except sqlite3.OperationalError as error:
            if primary_code(error) != sqlite3.SQLITE_BUSY:
                raise
        with closing(open_writer(path)) as connection:
            if not _is_older(connection):
                return []
        if time.monotonic() > deadline:
            raise _in_use(path)
        time.sleep(_BETWEEN_TRIES)


def _in_use(path: str) -> StoreError:
    return StoreError(
        f"{path} was made by an older ORÁCULO and must be migrated, but another process has it open: stop all others "
        "first, then start this again"
    )


def _version(connection: sqlite3.Connection) -> int:
    [(version,)] = connection.execute("PRAGMA user_version").fetchall()
    return int(version)


def _migrate(connection: sqlite3.Connection, path: str, *, alone: bool) -> list[str]:
    known = migrations("sqlite")
    with Transaction(connection):
        version = _version(connection)
        if version > len(known):
            raise StoreError(
                f"{path} was written by a newer ORÁCULO (its schema is {version}, this program knows {len(known)}): "
                "run that version, or give ORACULO_STORE_URL another file"
            )
        if 0 < version < len(known) and not alone:
            raise _in_use(path)  # by one that has just made it
        for migration in known[version:]:
            for statement in _statements(migration.step):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {migration.number}")
    return [migration.label for migration in known[version:]]


def _statements(script: str) -> Iterator[str]:
    """One by one, because executescript() would end the transaction."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


# -- the border: SQLite's errors become ours ------------------------------------------------------------------------

# A disk that is full or over its quota tells it to SQLite in many places, by codes of their own: only a write of the
# file itself that finds no space is SQLITE_FULL. What cannot be read is not among them: it may be of one run alone.
_OF_THE_DISK = frozenset(
    {
        sqlite3.SQLITE_IOERR_WRITE,
        sqlite3.SQLITE_IOERR_FSYNC,
        sqlite3.SQLITE_IOERR_DIR_FSYNC,
        sqlite3.SQLITE_IOERR_TRUNCATE,
        sqlite3.SQLITE_IOERR_SHMOPEN,
        sqlite3.SQLITE_IOERR_SHMSIZE,
        sqlite3.SQLITE_IOERR_SHMMAP,
    }
)
# They speak of the file, the disk or another process, and of no batch: nobody's is taken until that is mended.
_REFUSALS = _OF_THE_DISK | frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_PROTOCOL,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
    }
)
# What SQLite says to a program that knows another schema than the file has; there is no code for it.
_OTHER_SCHEMA = re.compile(r"no such (table|column|index): |table \S+ has (no column named|\d+ columns but) ")
_WORTH_A_RETRY = frozenset({sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOMEM})
FOREIGN = (sqlite3.Error, OverflowError, UnicodeError, msgspec.EncodeError)


class Translated:
    """SQLite's errors leave it as ours. A class, as `Transaction` is: every commit enters both, and what contextlib
    makes of a generator takes several times as long."""

    __slots__ = ("_path",)

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and isinstance(error, FOREIGN):
            raise ours(error, self._path) from error


def ours(error: Exception, path: str) -> StoreError:
    told = _kind_of(error)(f"SQLite file {path}: {_in_words(error)}")
    told.__cause__ = error
    return told


def is_for_want_of_room(error: StoreError) -> bool:
    """Return whether the disk, or a quota, is full, as far as the system says so."""
    cause = error.__cause__
    if isinstance(cause, OSError):
        return cause.errno in (errno.ENOSPC, errno.EDQUOT)
    return getattr(cause, "sqlite_errorcode", 0) in _OF_THE_DISK | {sqlite3.SQLITE_FULL}


def _in_words(error: Exception) -> str:
    if getattr(error, "sqlite_errorcode", 0) not in _OF_THE_DISK:
        return str(error)
    return f"{error} ({getattr(error, 'sqlite_errorname', '')}): is the disk full, over its quota or read-only?"


def _kind_of(error: Exception) -> type[StoreError]:
    code = primary_code(error)
    if code in _REFUSALS or getattr(error, "sqlite_errorcode", 0) in _REFUSALS or _is_of_another_schema(error):
        return StoreRefuses
    return StoreUnavailable if code in _WORTH_A_RETRY else StoreError


def _is_of_another_schema(error: Exception) -> bool:
    return primary_code(error) == sqlite3.SQLITE_ERROR and _OTHER_SCHEMA.match(str(error)) is not None


def primary_code(error: Exception) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


class Transaction:
    """Keeps all that was done within it, or nothing. Why it is a class: see `Translated`."""

    __slots__ = ("_connection",)

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._roll_back()
            return
        try:
            self._connection.execute("COMMIT")
        except BaseException:
            self._roll_back()
            raise

    def _roll_back(self) -> None:
        if self._connection.in_transaction:  # SQLite ends it by itself when the disk is full
            self._connection.execute("ROLLBACK")
