"""What is not shown of a webhook's URL: its password, and its query, which often is what lets one in (`?token=…`). They
are for the delivery alone."""

import re

_PASSWORD = re.compile(r"(?<=://)([^/?#\s:]*):[^/?#\s]*@")  # with the user before it
_QUERY = re.compile(r"(://[^\s?]*\?)\S+?(?=[:,;.)]?(?:\s|$))")  # but not what ends the words around it


def masked(text: str) -> str:
    """A URL, or words with URLs among them."""
    return _QUERY.sub(r"\1***", _PASSWORD.sub(r"\1:***@", text))
