"""The mask for keys in addresses, before uvicorn's access log shows them."""

import logging
import re
from collections.abc import Sequence
from urllib.parse import unquote, unquote_plus

from oraculo.settings import read_key

_MASK = "***"
_SECRETS = re.compile(
    r"((?:^|&)[^=&]*(?:key|token|secret|passw(?:or)?d|pwd|auth(?:orization)?|bearer|jwt|sig(?:nature)?)=)[^&]*",
    re.IGNORECASE,
)


def mask_keys(keys: Sequence[str]) -> None:
    """Mask parameters with names of secrets, and addresses with one of these keys, in this process's access log."""
    logger = logging.getLogger("uvicorn.access")
    for old in [old for old in logger.filters if isinstance(old, _Masking)]:
        logger.removeFilter(old)
    logger.addFilter(_Masking(keys))


class _Masking(logging.Filter):
    def __init__(self, keys: Sequence[str]) -> None:
        super().__init__()
        self._keys = [read_key(entry)[1] for entry in keys]

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(self._masked(arg) if isinstance(arg, str) else arg for arg in record.args)
        return True

    def _masked(self, target: str) -> str:
        path, mark, query = target.partition("?")
        path = f"/{_MASK}" if self._has_key(path) else path
        return path + mark + (_MASK if self._has_key(query) else _SECRETS.sub(rf"\1{_MASK}", query))

    def _has_key(self, part: str) -> bool:
        """Return whether a part of an address has a key. A plus may mean itself or a blank."""
        return any(key in text for key in self._keys for text in (unquote(part), unquote_plus(part)))
