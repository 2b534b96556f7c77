from oraculo.core.troubled_queues import TroubledQueues


def test_a_queue_is_told_of_for_a_while_unless_it_works() -> None:
    queues = TroubledQueues(10)
    assert not queues
    queues.note(["a", "b"], "down", 100)
    queues.note(["a"], "full", 105)
    assert queues.told(106) == {"b": "down", "a": "full"}
    assert (queues.has("b", 109), queues.has("b", 110), queues.has("a", 110)) == (True, False, True)
    assert queues.told(112) == {"a": "full"}
    queues.works(["a", "c"])
    assert queues.told(106) == {"b": "down"}
    queues.clear()
    assert not queues


def test_of_many_the_latest_are_told() -> None:
    queues = TroubledQueues(10)
    queues.note((f"q{number}" for number in range(1050)), "down", 0)
    queues.note(["q60"], "down again", 0)
    assert [*queues.told(1)] == [*(f"q{number}" for number in range(50, 1050) if number != 60), "q60"]
