"""In which order the commands that wait go out."""

from oraculo.engine.send.run_order import TURN, RunOrder


def filled(**runs: int) -> RunOrder[str]:
    """Wide runs, with so many commands each."""
    turns: RunOrder[str] = RunOrder()
    for run_id, commands in runs.items():
        for _ in range(commands):
            turns.add(run_id, run_id, is_one_of_many=True)
    return turns


def order(turns: RunOrder[str], *, few_only: bool = False) -> str:
    return "".join(turns.take(1000, 1000, len, few_only=few_only))


def test_wide_runs_take_turns() -> None:
    turns = filled(a=2 * TURN, b=TURN + 1, c=1)
    assert order(turns) == "a" * TURN + "b" * TURN + "c" + "a" * TURN + "b"
    assert not turns


def test_a_small_run_goes_before_wide_ones_and_leaves_them_every_second_place() -> None:
    turns = filled(a=10)
    for _ in range(3):
        turns.add("s", "s")
    assert order(turns) == "s" + "as" * 2 + "a" * 8


def test_small_runs_go_by_priority_then_age() -> None:
    turns: RunOrder[str] = RunOrder()
    for run_id, priority, age in (("d", 0, 7.0), ("c", 0, 5.0), ("a", 9, 8.0), ("b", 3, 9.0), ("e", 0, 7.0)):
        turns.add(run_id, run_id, priority=priority, age=age)
    assert order(turns) == "abcde"


def test_wide_runs_go_by_priority() -> None:
    turns = filled(a=2)
    for _ in range(TURN + 1):
        turns.add("u", "u", priority=9, is_one_of_many=True)
    assert order(turns) == "u" * (TURN + 1) + "aa"


def test_wide_runs_can_be_held_back() -> None:
    turns = filled(a=2)
    turns.add("s", "s")
    assert order(turns, few_only=True) == "s"
    assert order(turns, few_only=True) == ""
    assert len(turns) == 2
    assert order(turns) == "aa"


def test_what_is_taken_is_bounded_and_the_first_fits_always() -> None:
    turns: RunOrder[str] = RunOrder()
    for item in ("aaaa", "bb", "c", "d"):
        turns.add(item[0], item)
    assert turns.take(10, 3, len) == ["aaaa"]
    assert turns.take(10, 3, len) == ["bb", "c"]
    assert turns.take(1, 3, len) == ["d"]
