"""Tracebacks of failed attempts: their longest form, and their place in a history entry."""

MAX_TRACEBACK = 16 * 1024  # bytes
_TRACEBACK_MARK = "\x1e"  # in a detail, before the traceback; no other text has it


def bounded_traceback(text: str) -> str:
    """Return a traceback, or the end of a long one, which names the error and its place."""
    encoded = text.replace("\0", "\ufffd").replace(_TRACEBACK_MARK, "\ufffd").encode(errors="replace")
    if len(encoded) <= MAX_TRACEBACK:
        return encoded.decode()
    return "…" + encoded[-(MAX_TRACEBACK - len("…".encode())) :].decode(errors="ignore")


def with_traceback(detail: str, traceback: str | None) -> str:
    return detail if traceback is None else f"{detail}{_TRACEBACK_MARK}{traceback}"


def split_traceback(detail: str | None) -> tuple[str | None, str | None]:
    """Return the detail of a history entry for people, and the traceback behind it."""
    text, mark, traceback = (detail or "").partition(_TRACEBACK_MARK)
    return (text, traceback) if mark else (detail, None)
