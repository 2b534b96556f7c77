"""Tracebacks of failed attempts: how long they may be, and where they stand in a history entry."""

MAX_TRACEBACK = 16 * 1024  # bytes
_TRACEBACK_MARK = "\x1e"  # in a detail, before the traceback of the attempt; no other text has it


def bounded_traceback(text: str) -> str:
    """Return a traceback as it is sent and kept: of a long one the end, which names the error and its place."""
    encoded = text.replace("\0", "\ufffd").replace(_TRACEBACK_MARK, "\ufffd").encode(errors="replace")
    if len(encoded) <= MAX_TRACEBACK:
        return encoded.decode()
    return "…" + encoded[-(MAX_TRACEBACK - len("…".encode())) :].decode(errors="ignore")


def with_traceback(detail: str, traceback: str | None) -> str:
    return detail if traceback is None else f"{detail}{_TRACEBACK_MARK}{traceback}"


def parted(detail: str | None) -> tuple[str | None, str | None]:
    """Return the detail of a history entry for people, and the traceback behind it."""
    told, mark, traceback = (detail or "").partition(_TRACEBACK_MARK)
    return (told, traceback) if mark else (detail, None)
