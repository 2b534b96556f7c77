"""Masking of the secrets in webhook URLs: the password, and the query, which often holds a token."""

import re

_PASSWORD = re.compile(r"(?<=://)([^/?#\s:]*):[^/?#\s]*@")  # the user stays
_URL = re.compile(r"://\S*")  # matches a whole URL at once, because a long text may hold many
_CLOSING = ":,;.)]'\""  # signs of the sentence around a URL


def masked(text: str) -> str:
    """Return a text with the secrets of its URLs masked."""
    return _URL.sub(_without_query, _PASSWORD.sub(r"\1:***@", text))


def _without_query(found: re.Match[str]) -> str:
    url, _, query = found[0].partition("?")
    hidden = query.rstrip(_CLOSING) or query
    return f"{url}?***{query[len(hidden) :]}" if query else found[0]
