"""Connections to one SQLite file: opening, migrating, and translating SQLite's errors."""

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
_BETWEEN_TRIES = 0.05  # seconds between two tries to have the file alone
WAL_PAGES = 4000


def make_parent(path: str) -> None:
    """Create the folder of the file, readable by its owner alone: the file holds payloads and webhook passwords.

    An existing folder is left as it is.
    """
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
    """Switch the file to WAL mode, inside a transaction.

    While another process does the same to a new file, SQLite refuses at once, whatever the busy timeout. It does wait
    for the transaction to begin.
    """
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
    """Set whether a commit may wait for another process and checkpoint the WAL. Never in the event loop's thread."""
    connection.execute(f"PRAGMA busy_timeout = {int(BUSY_SECONDS * 1000) if patient else 0}")
    connection.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES if patient else 0}")


def is_older_file(path: str) -> bool:
    """Return True when `start` would migrate the file. Changes nothing, and leaves errors to `start`."""
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
        isolation_level=None,  # explicit transactions: the module must not begin any
        cached_statements=256,
        uri=uri,
        check_same_thread=check_same_thread,
    )
    connection.create_function("folded", 1, str.casefold, deterministic=True)
    return connection


def open_up_to_date(path: str) -> tuple[sqlite3.Connection, list[str]]:
    """Return the writer's connection, and the migrations that were done.

    Several processes may create a new file at once. A file of an older version is migrated only while nobody else uses
    it, because the other process would meet unknown tables.
    """
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
    """Migrate the file while nobody else has it open, and return the steps that were done.

    In WAL mode each process holds a lock on the file, whatever its version. It may hold the lock for a moment only, or
    be about to migrate too, so this tries again for a while.
    """
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
            raise _in_use(path)  # in use by a process that has just created it
        for migration in known[version:]:
            for statement in _statements(migration.step):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {migration.number}")
    return [migration.label for migration in known[version:]]


def _statements(script: str) -> Iterator[str]:
    """Yield the statements one by one, because executescript() would end the transaction."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


# -- errors ---------------------------------------------------------------------------------------------------------

# A full disk or quota gives many codes; only a write of the file itself gives SQLITE_FULL. Errors of reading are left
# out, because they may concern one run alone.
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
# Errors of the file, the disk or another process: no commit is taken until somebody repairs that.
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
# SQLite's texts for a statement that does not fit the schema of the file. There is no code for them.
_OTHER_SCHEMA = re.compile(r"no such (table|column|index): |table \S+ has (no column named|\d+ columns but) ")
_WORTH_A_RETRY = frozenset({sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOMEM})
FOREIGN = (sqlite3.Error, OverflowError, UnicodeError, msgspec.EncodeError)


class Translated:
    """A context that raises SQLite's errors as ours. A class, because contextlib's generators are slower."""

    __slots__ = ("_path",)

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and isinstance(error, FOREIGN):
            raise ours(error, self._path) from error


def ours(error: Exception, path: str) -> StoreError:
    ours = _kind_of(error)(f"SQLite file {path}: {_in_words(error)}")
    ours.__cause__ = error
    return ours


def is_for_want_of_room(error: StoreError) -> bool:
    """Return True when a disk or quota is known to be full."""
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
    """A context that keeps all that was done in it, or nothing. A class for the same reason as `Translated`."""

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
        if self._connection.in_transaction:  # SQLite ends the transaction itself when the disk is full
            self._connection.execute("ROLLBACK")
