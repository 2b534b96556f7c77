"""What is not shown of a webhook's URL: its password, and its query, which often is what lets one in (`?token=…`). They
are for the delivery alone."""

import re

_PASSWORD = re.compile(r"(?<=://)([^/?#\s:]*):[^/?#\s]*@")  # with the user before it
_URL = re.compile(r"://\S*")  # to its end at once: a text may be long, and full of them
_CLOSING = ":,;.)]'\""  # what may end the words around it


def masked(text: str) -> str:
    """A URL, or words with URLs among them."""
    return _URL.sub(_without_query, _PASSWORD.sub(r"\1:***@", text))


def _without_query(found: re.Match[str]) -> str:
    url, _, query = found[0].partition("?")
    hidden = query.rstrip(_CLOSING) or query
    return f"{url}?***{query[len(hidden) :]}" if query else found[0]
