"""The mask for keys in addresses, before uvicorn's access log shows them."""

import logging
import re
from collections.abc import Sequence
from urllib.parse import quote, unquote, unquote_plus

from oraculo.settings import read_key

_MASK = "***"
_SECRETS = re.compile(r"(key|token|secret|password|passwd|pwd|auth|authorization|bearer|jwt|signature|sig)\Z", re.I)


def mask_keys(keys: Sequence[str]) -> None:
    """Mask these keys, and parameters with names of secrets, in the access log of this process."""
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
        """Return a path with its query, masked."""
        path, mark, query = target.partition("?")
        if self._has_key(path):
            path = quote(self._without_keys(unquote(path)), safe="/*")
        parameters = "&".join(map(self._masked_parameter, query.split("&")))
        return path + mark + (_MASK if self._has_key(parameters) else parameters)

    def _masked_parameter(self, parameter: str) -> str:
        name, mark, value = parameter.partition("=")
        is_secret = _SECRETS.search(unquote_plus(name)) or self._has_key(value)
        return f"{name}={_MASK}" if mark and is_secret else parameter

    def _has_key(self, part: str) -> bool:
        """Return whether a part of an address has a key. A plus may mean itself or a blank."""
        texts = (unquote(part), unquote_plus(part))
        return any(key in text for key in self._keys for text in texts)

    def _without_keys(self, text: str) -> str:
        for key in self._keys:
            text = text.replace(key, _MASK)
        return text
