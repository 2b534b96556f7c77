"""A process that may open no more files takes no connections, and its event loop says nothing of it: uvloop takes each
that comes and closes it, so that clients see a server that hangs up on them."""

import errno
import logging
import os
import time

from oraculo.core.log_throttle import LogThrottle

_FULL = {
    errno.EMFILE: "this process may open no more files (`ulimit -n`, a service's LimitNOFILE)",
    errno.ENFILE: "the system may open no more files",
}

_logger = logging.getLogger("oraculo.api")


class FileLimit:
    def __init__(self) -> None:
        self._repeats = LogThrottle()

    def look(self) -> None:
        """Tells of it once a minute. Cheap: some microseconds."""
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            why = _FULL.get(error.errno or 0)
            if why is not None and self._repeats.times(why, time.monotonic()):
                _logger.error("connections are refused: %s", why)
