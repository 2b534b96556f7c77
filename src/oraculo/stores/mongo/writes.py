"""One run's part of a commit, as documents. Everything is built and encoded before the commit waits for anything: the
engine goes on changing the run, and what cannot be encoded must not be found out when half is written."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bson.objectid import ObjectId
from bson.raw_bson import RawBSONDocument
from pymongo import UpdateOne

from oraculo.core.run import Changes, Task
from oraculo.ports.store import Creation
from oraculo.stores.mongo.agenda import Agenda, agenda_of
from oraculo.stores.mongo.documents import (
    Attachments,
    changing_fields,
    encode_entries,
    entry_document,
    lasting_fields,
    new_key,
    task_document,
)
from oraculo.stores.mongo.portions import encoded
from oraculo.stores.mongo.server import Document

EMBEDDED_TASKS = 64  # a run of no more has them in its own document
BLOCK_TASKS = 32  # of a wider one, that are kept in one document
HISTORY_BLOCK = 64  # entries that are kept in one document, once there are as many
INLINE_ENTRIES = 1_000  # of one commit, that go through the run's own document
KEPT_COMMITS = 8  # that a run knows the names of


class Birth:
    """A new run: its own document, and what is kept apart."""

    __slots__ = ("attachments", "blocks", "changes", "document", "fingerprint", "key", "run_id", "run_key")

    def __init__(self, creation: Creation, commit: ObjectId) -> None:
        run = creation.changes.run
        self.changes = creation.changes
        self.run_id = run.head.id
        self.run_key = new_key(run.head.created_at)
        self.key = creation.idempotency_key
        self.fingerprint = creation.fingerprint
        attachments = Attachments(self.run_key)
        self.blocks: list[RawBSONDocument] = []
        document: Document = {
            "_id": self.run_key,
            **lasting_fields(run.head, self.fingerprint, self.key),
            **changing_fields(run.head, 1, agenda_of(run.head, run.tasks)),
            **self._tasks(run.tasks, attachments),
            "payload": attachments.keep(run.payload),
            "definicao": attachments.keep(run.definition),
            "gravacoes": [commit],
        }
        for name, entries in _told(self.changes, attachments).items():
            document[name] = entries
        self.attachments = [encoded(part) for part in attachments.documents]
        if self.has_sides:
            document["lateral"] = True
        self.document = encoded(document)

    def _tasks(self, tasks: Sequence[Task], attachments: Attachments) -> Document:
        steps = self.changes.run.plan.steps
        documents = [task_document(task, steps[task.number], attachments) for task in tasks]
        if not is_wide(len(tasks)):
            return {"tarefas": documents}
        directory = []
        for number, start in enumerate(range(0, len(tasks), BLOCK_TASKS)):
            name, end = ObjectId(), start + BLOCK_TASKS
            self.blocks.append(encoded(block_document(name, self.run_key, self.run_id, number, documents[start:end])))
            directory.append(block_entry(name, Agenda.of_tasks(tasks[start:end])))
        return {"blocos": directory}

    @property
    def has_sides(self) -> bool:
        return bool(self.blocks or self.attachments)


class Update:
    """A change of a run, to be written where its stored version is the one that it was decided on."""

    __slots__ = ("agendas", "attachments", "changes", "commit", "fields", "run_id", "tasks", "told", "version", "wide")

    def __init__(self, changes: Changes, commit: ObjectId) -> None:
        run, head = changes.run, changes.run.head
        self.changes = changes
        self.commit = commit
        self.run_id = head.id
        self.version = changes.based_on + 1
        self.wide = is_wide(head.total)
        attachments = Attachments("")
        steps = run.plan.steps
        self.tasks = {
            number: encoded(task_document(task, steps[number], attachments)) for number, task in changes.tasks.items()
        }
        self.told = {name: [encoded(entry) for entry in told] for name, told in _told(changes, attachments).items()}
        self.attachments = attachments.documents
        agenda = {} if self.wide else agenda_of(head, run.tasks)
        self.fields = changing_fields(head, self.version, agenda)
        encoded(self.fields)
        self.agendas: dict[int, Agenda] = {}  # of the blocks that it changes
        if self.wide:
            for block in {number // BLOCK_TASKS for number in self.tasks}:
                start = block * BLOCK_TASKS
                self.agendas[block] = Agenda.of_tasks(run.tasks[start : start + BLOCK_TASKS])

    @property
    def based_on(self) -> int:
        return self.version - 1

    @property
    def size(self) -> int:
        """About how many bytes go into the run's own document."""
        return sum(len(one.raw) for some in (self.tasks.values(), *self.told.values()) for one in some)

    @property
    def is_light(self) -> bool:
        """It is one write, to one document, that nothing need be read for."""
        return not self.wide and not self.attachments

    def light_operation(self) -> UpdateOne:
        return self.operation({"correlation_id": self.run_id, "esquecida": None}, self.fields | self.embedded_tasks())

    def embedded_tasks(self) -> Document:
        return {f"tarefas.{number}": task for number, task in self.tasks.items()}

    def operation(self, where: Document, fields: Document) -> UpdateOne:
        push: Document = {"gravacoes": {"$each": [self.commit], "$slice": -KEPT_COMMITS}}
        for name, entries in self.told.items():
            push[name] = {"$each": entries}
        return UpdateOne({**where, "revisao": self.based_on}, {"$set": fields, "$push": push})

    def was_written(self, found: Document | None) -> bool | None:
        """Whether it was this commit that made the version after the one it was decided on. None: so many followed that
        the run no longer knows."""
        if found is None or found["revisao"] < self.version:
            return False
        since = found["revisao"] - self.version
        if since >= len(found["gravacoes"]):
            return None
        return bool(found["gravacoes"][-1 - since] == self.commit)

    @property
    def fills_history(self) -> bool:
        """There is a block's worth of entries to move out of the run's document."""
        after = self.fields["estado"]["entries"]
        return bool(after // HISTORY_BLOCK > (after - len(self.changes.history)) // HISTORY_BLOCK)


def is_wide(total: int) -> bool:
    return total > EMBEDDED_TASKS


def block_document(
    name: ObjectId, run_key: str, run_id: str, number: int, tasks: Sequence[Mapping[str, Any]]
) -> Document:
    return {"_id": name, "run": run_key, "correlation_id": run_id, "numero": number, "tarefas": tasks}


def block_entry(name: ObjectId, agenda: Agenda) -> Document:
    """What a run's document says of a block."""
    return {"bloco": name, "agenda": agenda.document()}


def agenda_of_blocks(directory: Iterable[Document], due_at: float | None, ended_at: float | None) -> Document:
    return Agenda.of_documents(entry["agenda"] for entry in directory).document_of_run(due_at, ended_at)


def _told(changes: Changes, attachments: Attachments) -> dict[str, list[Document]]:
    """New history entries, by the field of the run's document that they are added to."""
    if not changes.history:
        return {}
    steps = changes.run.plan.steps
    entries = [entry_document(entry, steps) for entry in changes.history]
    if len(entries) <= INLINE_ENTRIES:
        return {"historico": entries}
    return {
        "historico_anexos": [
            {
                "de": entries[0]["seq"],
                "ate": entries[-1]["seq"],
                "anexo": attachments.parts(encode_entries(entries)),
            }
        ]
    }
