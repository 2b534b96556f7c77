"""The page of the state machine: what it draws of a table. `tests/test_generated_docs.py` holds it to the real ones."""

import pytest

from oraculo.core import diagram
from oraculo.core.run import TaskStatus
from oraculo.core.transitions import Trigger


def test_two_ways_from_one_status_to_another_share_an_arrow(monkeypatch: pytest.MonkeyPatch) -> None:
    moves = {Trigger.SUCCEED: TaskStatus.SUCCEEDED, Trigger.AMEND: TaskStatus.SUCCEEDED}
    monkeypatch.setattr(diagram, "TASK_TRANSITIONS", {TaskStatus.RUNNING: moves})
    page = diagram.state_machine_page()
    assert "    em_execucao --> concluida : answer = success / late answer with onLate = amend\n" in page
    assert "| `em_execucao` | answer: success | `concluida` |\n" in page
    assert "| `em_execucao` | late answer with onLate: amend | `concluida` |\n" in page
