"""A lock that a process holds on a file, alone or with its like, and that the system lets go of when the process ends,
however it ends."""

import os
from pathlib import Path

from oraculo.errors import StoreError, StoreUnavailable

try:
    import fcntl
except ImportError:  # Windows has another call for it; there the lock is not kept
    fcntl = None  # type: ignore[assignment]


class FileLock:
    """`exclusive`: for one process, whose messages are in its memory. Else for all whose broker is a real one."""

    def __init__(self, path: str, *, exclusive: bool) -> None:
        self._path = Path(path)
        self._exclusive = exclusive
        self._descriptor: int | None = None

    def take(self) -> None:
        """Raises StoreError when another process has it. Taking it twice does nothing."""
        if self._descriptor is not None or fcntl is None:
            return
        try:
            self._descriptor = self._locked()
        except BlockingIOError:
            holder = "another process" if self._exclusive else "a process on memory://"
            raise StoreError(
                f"{self._path.with_suffix('')} is in use by {holder}, and messages in memory cannot be shared "
                "between processes: stop that one, or give ORACULO_STORE_URL another file"
            ) from None
        except OSError as error:
            if self._exclusive:  # those who share it can do without, where there are no locks
                raise StoreUnavailable(f"{self._path} cannot be locked: {error.strerror}") from error

    def _locked(self) -> int:
        access, kind = (os.O_RDWR, fcntl.LOCK_EX) if self._exclusive else (os.O_RDONLY, fcntl.LOCK_SH)
        descriptor = os.open(self._path, access | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
