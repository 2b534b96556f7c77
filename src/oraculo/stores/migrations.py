"""A step from one layout of a store to the next."""

from typing import Generic, NamedTuple, TypeVar

Step = TypeVar("Step")


class Migration(NamedTuple, Generic[Step]):
    number: int
    name: str
    step: Step  # what is to be done: a script, or a function of the server

    @property
    def label(self) -> str:
        """For people: `0002 via`."""
        return f"{self.number:04} {self.name}"
