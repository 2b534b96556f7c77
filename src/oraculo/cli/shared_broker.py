"""The check for a broker that several processes can share."""

from typing import TYPE_CHECKING

from oraculo.errors import Fault, InvalidSettings

if TYPE_CHECKING:
    from oraculo.settings import Settings


def expect_shared_broker(settings: "Settings", instead: str = "") -> None:
    """Raise InvalidSettings for `memory://`. `instead` names the command that works with it."""
    if all(url.startswith("memory:") for url in settings.broker.urls):
        alone = "memory:// lives inside one process and no other can reach it"
        way_out = f"{instead}{', or ' if instead else ''}set it to a broker that is shared"
        raise InvalidSettings(Fault("ORACULO_BROKER_URL", f"{alone}; {way_out}"))
