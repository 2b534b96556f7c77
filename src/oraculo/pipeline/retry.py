"""When a failed attempt is tried again: exponential backoff with full jitter, capped."""

import msgspec


class RetryPolicy(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    max_attempts: int = 3
    backoff: float = 1.0
    max_backoff: float = 60.0

    def delay(self, attempt: int, jitter: float) -> float:
        """Seconds to wait after failed attempt number `attempt`. `jitter` in [0, 1) is drawn by the caller.

        Full jitter, because many tasks fail together when a service does, and should not come back together.
        """
        # 2**63 overflows no float; without the bound a long-lived task would raise OverflowError.
        ceiling = min(self.max_backoff, self.backoff * 2.0 ** min(attempt - 1, 63))
        return ceiling * jitter


DEFAULT_RETRY = RetryPolicy()  # what a step of a stored definition means that says none: it cannot change
