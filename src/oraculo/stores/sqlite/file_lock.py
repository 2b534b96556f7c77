"""A lock that one process holds on a file, and that the system lets go of when the process ends, however it ends."""

import os
from pathlib import Path

from oraculo.errors import StoreError, StoreUnavailable

try:
    import fcntl
except ImportError:  # Windows has another call for it; there the lock is not kept
    fcntl = None  # type: ignore[assignment]


class FileLock:
    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._descriptor: int | None = None

    def take(self) -> None:
        """Raises StoreError when another process has it. Taking it twice does nothing."""
        if self._descriptor is not None or fcntl is None:
            return
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StoreUnavailable(f"{self._path} cannot be opened: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise StoreError(
                f"{self._path.with_suffix('')} is in use by another process, and messages in memory cannot be shared "
                "between processes: stop that one, or give ORACULO_STORE_URL another file"
            ) from None
        self._descriptor = descriptor

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
