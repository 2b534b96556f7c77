"""A dict with a limit: it forgets its oldest entries, so that memory stays bounded."""

from collections import OrderedDict
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class RecentDict(OrderedDict[Key, Value]):
    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def __setitem__(self, key: Key, value: Value) -> None:
        super().__setitem__(key, value)
        if len(self) > self._limit:
            self.popitem(last=False)
