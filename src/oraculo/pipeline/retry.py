"""The backoff of retries: exponential, capped, with full jitter."""

import msgspec


class RetryPolicy(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The attempts of a step and the pauses between them, in seconds."""

    max_attempts: int = 3
    backoff: float = 1.0
    max_backoff: float = 60.0

    def delay(self, attempt: int, jitter: float) -> float:
        """Return the seconds to wait after failed attempt number `attempt`. The caller draws `jitter` from [0, 1).

        Tasks fail together when a service fails. Full jitter keeps them from coming back together.
        """
        # Without this bound the power overflows a float at a high attempt.
        ceiling = min(self.max_backoff, self.backoff * 2.0 ** min(attempt - 1, 63))
        return ceiling * jitter


DEFAULT_RETRY = RetryPolicy()  # never changes, because stored definitions leave it out
