"""Words that a store wrote, read back."""

import pytest

from oraculo.core.run import Cause, RunStatus, TaskStatus
from oraculo.errors import OraculoError
from oraculo.stores.statuses import CAUSE, RUN_STATUS, TASK_STATUS


def test_what_was_written_is_read_as_it_was_meant() -> None:
    assert [RUN_STATUS[one.value] for one in RunStatus] == list(RunStatus)
    assert [TASK_STATUS[one.value] for one in TaskStatus] == list(TaskStatus)
    assert [CAUSE[one] for one in (None, *(cause.value for cause in Cause))] == [None, *Cause]


@pytest.mark.parametrize("table", [RUN_STATUS, TASK_STATUS, CAUSE])
def test_a_word_of_a_newer_version_is_told_as_that_and_is_not_waited_for(table: dict[str | None, object]) -> None:
    with pytest.raises(LookupError, match="'novo' of a run, as a newer ORÁCULO writes it: run that version") as told:
        table["novo"]
    assert not isinstance(told.value, OraculoError)
