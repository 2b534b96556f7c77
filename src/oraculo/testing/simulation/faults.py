"""The kinds of faults, each with a rate."""

import msgspec

from oraculo.errors import Fault, InvalidInput


class Faults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rates from 0 to 1, for each message, call, job or second as the field says."""

    drop: float = 0.0  # a confirmed message is lost
    duplicate: float = 0.0  # a message arrives twice
    delay: float = 0.0  # a message arrives up to 5 s later, so that others overtake it
    refuse: float = 0.0  # a publish is refused
    not_taken: float = 0.0  # some queues of a publish are full or down
    too_large: float = 0.0  # the broker says that a command is too large for it
    hang: float = 0.0  # a publish hangs for up to 20 s, then fails half done
    lost_ack: float = 0.0  # an ack does not reach the broker
    lose_memory: float = 0.0  # each second and broker: it forgets everything
    away: float = 0.0  # each second and broker: it is gone or frozen up to 25 s; some of several forever
    engine_crash: float = 0.0  # each call an engine makes: it dies just before or just after
    worker_crash: float = 0.0  # each call a worker makes
    slow_store: float = 0.0  # a call to the store takes up to 2 s
    failed_commit: float = 0.0  # a commit fails and nothing is written
    lost_commit: float = 0.0  # a commit is written, and its caller hears that it failed
    failed_read: float = 0.0  # the store cannot be read
    clock_jump: float = 0.0  # each second: the clock is set up to 20 s forward or back

    @classmethod
    def usual(cls) -> "Faults":
        return cls(
            drop=0.02,
            duplicate=0.05,
            delay=0.1,
            refuse=0.03,
            not_taken=0.03,
            hang=0.01,
            lost_ack=0.02,
            lose_memory=0.005,
            away=0.005,
            engine_crash=0.006,
            worker_crash=0.004,
            slow_store=0.05,
            failed_commit=0.02,
            lost_commit=0.02,
            failed_read=0.01,
            clock_jump=0.01,
        )

    def without(self, kind: str) -> "Faults":
        return msgspec.structs.replace(self, **{kind: 0.0})

    def kinds(self) -> list[str]:
        """Return the kinds that can happen."""
        return [kind for kind in self.__struct_fields__ if getattr(self, kind) > 0]

    @classmethod
    def parse(cls, settings: list[str]) -> "Faults":
        """Read `["drop=0.05", …]`. Raises InvalidInput, which says what is right."""
        rates: dict[str, float] = {}
        for setting in settings:
            kind, _, text = setting.partition("=")
            if kind not in cls.__struct_fields__:
                raise InvalidInput(
                    Fault("--fault", f"there is no fault '{kind}'; known: {', '.join(cls.__struct_fields__)}")
                )
            try:
                rates[kind] = float(text)
            except ValueError:
                rates[kind] = -1.0
            if not 0 <= rates[kind] <= 1:
                raise InvalidInput(Fault("--fault", f"{kind} needs a rate from 0 to 1, as {kind}=0.05"))
        return cls(**rates)
