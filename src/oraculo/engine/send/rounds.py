"""Where the looks for what is unsent begin, when there is more of it than can be remembered.

Only what was seen before is sent, for it may be another engine's, on its way now. So looks stay with as many as can be
remembered until all of these had their time, and then go on behind them: else what nobody takes would hide for ever
what comes after it.
"""

Place = tuple[str, int]  # run id, task
STAY = 30.0  # seconds at least: whatever a full queue is offered for the first time it is offered as a whole


class Round:
    def __init__(self) -> None:
        self.start: Place | None = None  # behind it; None: at the first of all
        self._end: Place | None = None  # of those that have their time now; None: the last of all
        self._since: float | None = None  # when all of them were seen

    def looked(self, until: Place | None, began: float, now: float, patience: float) -> None:
        """`until`: where it could remember no more; None when it came to the last. `patience`: after how many seconds
        whatever is still unsent is anybody's to send."""
        if self.start is None and until is None:
            self._since = None
        elif self._since is None:
            self._since, self._end = now, until
        elif began - self._since >= max(STAY, patience):
            self._since, self.start = None, self._end

    def interrupted(self) -> None:
        """What was not looked at was forgotten."""
        self._since = None
