"""A migration: one step from a layout of a store to the next."""

from typing import Generic, NamedTuple, TypeVar

Step = TypeVar("Step")


class Migration(NamedTuple, Generic[Step]):
    """A numbered step."""

    number: int
    name: str
    step: Step  # a script, or a function of the server

    @property
    def label(self) -> str:
        """Return number and name, for people: `0002 via`."""
        return f"{self.number:04} {self.name}"
