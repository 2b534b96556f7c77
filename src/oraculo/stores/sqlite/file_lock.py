"""A lock on a file, exclusive or shared. The system releases it however the process ends."""

import os
from pathlib import Path

from oraculo.errors import StoreError, StoreUnavailable

try:
    import fcntl
except ImportError:  # Windows has no fcntl, so there is no lock
    fcntl = None  # type: ignore[assignment]


class FileLock:
    """A lock that is `exclusive` to a process with the memory broker, or shared by processes with real brokers."""

    def __init__(self, path: str, *, exclusive: bool) -> None:
        self._path = Path(path)
        self._exclusive = exclusive
        self._descriptor: int | None = None

    def take(self) -> None:
        """Take the lock. Raises StoreError when another process holds it. Taking it twice does nothing."""
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
            if self._exclusive:  # a shared lock may fail on a file system without locks
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
