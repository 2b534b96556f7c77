"""The settings of the clock, and the times when engines had a reason to wait: the meaning of "in time"."""

from bisect import bisect_right

_SLACK = 1e-6  # seconds, for floating-point sums
_SHOWN = 0.0011  # seconds: times are shown in milliseconds, rounded down


class Timeline:
    """The history of the clock. Moments are the loop's and only increase; times are the clock's and may be set back."""

    def __init__(self, epoch: float) -> None:
        self._epoch = epoch
        self._settings: list[tuple[float, float]] = [(0.0, 0.0)]  # moment, and the clock's offset since
        self._stalls: list[tuple[float, float]] = []
        self._busy: dict[str, list[tuple[float, float]]] = {}

    # -- records ------------------------------------------------------------------------------------------------

    def clock_was_set(self, moment: float, skew: float) -> None:
        self._settings.append((moment, skew))
        self.stalled(moment, moment)

    def stalled(self, since: float, until: float) -> None:
        """Record that something kept the engines from deciding between these moments."""
        self._stalls.append((since, until))

    def was_busy(self, host: str, since: float, until: float) -> None:
        """Record that a host waited for a slow store."""
        self._busy.setdefault(host, []).append((since, until))
        self.stalled(since, until)

    # -- answers ------------------------------------------------------------------------------------------------

    def time(self, moment: float) -> float:
        return self._epoch + moment + self._settings[-1][1]

    def latest_time(self, since: float, until: float) -> float:
        """Return the latest time that the clock could show at the end, by any setting in this stretch."""
        return self._epoch + until + max(skew for _, _, skew in self._pieces(since, until))

    def began_to_decide(self, host: str, moment: float) -> float:
        """Return the earliest moment when this host may have decided what it commits now."""
        for since, until in sorted(self._busy.get(host, ())[-20:], key=lambda each: each[1], reverse=True):
            if until > moment + _SLACK:
                continue
            if until < moment - _SLACK:
                break
            moment = min(moment, since)
        return moment

    def moment_of(self, time: float, since: float, until: float) -> float | None:
        """Return the latest moment in this stretch when the clock showed that time, or None."""
        for begin, end, skew in reversed(list(self._pieces(since, until))):
            moment = time - self._epoch - skew
            if begin - _SLACK <= moment <= end + _SLACK:
                return moment
        return None

    def passed_at(self, time: float, moment: float) -> float | None:
        """Return the moment since when the clock has shown that time or a later one, or None."""
        since: float | None = None
        for begin, end, skew in reversed(list(self._pieces(0.0, moment))):
            reached = time - self._epoch - skew
            if reached > end + _SLACK:
                break
            since = max(begin, reached)
            if reached > begin:
                break
        return since

    def calm_within(self, since: float, until: float) -> float:
        """Return the longest time in this stretch in which nothing kept an engine from deciding."""
        longest, cursor = 0.0, since
        for begin, end in sorted(each for each in self._stalls if each[1] >= since and each[0] <= until):
            longest = max(longest, begin - cursor)
            cursor = max(cursor, end)
        return max(longest, until - cursor)

    def _pieces(self, since: float, until: float) -> list[tuple[float, float, float]]:
        """Yield the stretches between settings of the clock, each with its offset."""
        first = max(0, bisect_right(self._settings, (since - _SLACK, float("-inf"))) - 1)
        pieces = []
        for number in range(first, len(self._settings)):
            begin, skew = self._settings[number]
            end = self._settings[number + 1][0] if number + 1 < len(self._settings) else until
            if begin <= until + _SLACK and end >= since - _SLACK:
                pieces.append((max(begin, since), min(end, until), skew))
        return pieces


def is_shown_as(time: float | None, shown: float | None) -> bool:
    """Return True when a document shows this time."""
    if time is None or shown is None:
        return time is shown
    return abs(time - shown) <= _SHOWN
