"""What a run, or a block of its tasks, is to be found by: kept beside them, written in the same moment."""

from collections.abc import Iterable
from typing import Any

from oraculo.core.run import RunHead, Task, TaskStatus

_RUNNING = TaskStatus.RUNNING


class Agenda:
    """`due`: the earliest timer. `unsent`: there is something to send. `held`, `letters`: the brokers that took
    commands in work, and dead letters; None among them: it was not noted which."""

    __slots__ = ("due", "held", "letters", "unsent")

    def __init__(self) -> None:
        self.due: float | None = None
        self.unsent = False
        self.held: set[str | None] = set()
        self.letters: set[str | None] = set()

    @classmethod
    def of_tasks(cls, tasks: Iterable[Task]) -> "Agenda":
        agenda = cls()
        for task in tasks:
            due = task.due_at
            if due is not None and (agenda.due is None or due < agenda.due):
                agenda.due = due
            if task.unsent:
                agenda.unsent = True
                continue
            if task.status is _RUNNING:
                agenda.held.add(task.via)
            if task.dead_letter:
                agenda.letters.add(task.via)
        return agenda

    @classmethod
    def of_documents(cls, documents: Iterable[dict[str, Any]]) -> "Agenda":
        """All of them together."""
        agenda = cls()
        for document in documents:
            due = document.get("toca_em")
            if due is not None and (agenda.due is None or due < agenda.due):
                agenda.due = due
            agenda.unsent = agenda.unsent or "a_enviar" in document
            agenda.held.update(document.get("com", ()))
            agenda.letters.update(document.get("cartas_com", ()))
        return agenda

    def document(self) -> dict[str, Any]:
        """Only what there is: an index of what is missing stays small."""
        document: dict[str, Any] = {}
        if self.due is not None:
            document["toca_em"] = self.due
        if self.unsent:
            document["a_enviar"] = True
        if self.held:
            document["com"] = list(self.held)
        if self.letters:
            document["cartas_com"] = list(self.letters)
        return document

    def document_of_run(self, due_at: float | None, ended_at: float | None) -> dict[str, Any]:
        """With the run's own timer. `apagavel`: when it ended, once it has nothing left to deliver."""
        document = self.document()
        if due_at is not None and (self.due is None or due_at < self.due):
            document["toca_em"] = due_at
        if ended_at is not None and due_at is None and not self.unsent:
            document["apagavel"] = ended_at
        return document


def agenda_of(head: RunHead, tasks: Iterable[Task]) -> dict[str, Any]:
    return Agenda.of_tasks(tasks).document_of_run(head.due_at, head.ended_at)
