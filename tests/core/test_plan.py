"""A definition compiled once for all its runs."""

from oraculo.core.plan import Plan

from .building import pipeline, run_of


def test_names_become_numbers() -> None:
    plan = Plan(pipeline("a", "escavador_b<a", "c<a,escavador_b"))
    assert len(plan) == 3
    assert plan.by_id == {"a": 0, "escavador_b": 1, "c": 2}
    assert plan.dependencies == [(), (0,), (0, 1)]
    assert plan.dependents == [[1, 2], [2], []]
    assert plan.is_collector == [False, True, False]
    assert (plan.needed, plan.amends) == (None, False)


def test_the_only_one_of_a_kind_is_known() -> None:
    assert Plan(pipeline("a", "escavador_b")).only_of_kind == {True: 1, False: 0}
    assert Plan(pipeline("a", "b", "escavador_c")).only_of_kind == {True: 2, False: None}
    assert Plan(pipeline("a")).only_of_kind == {True: None, False: 0}


def test_a_dependency_may_stand_behind_its_dependent() -> None:
    assert Plan(pipeline("b<a", "a")).dependents == [[], [0]]


def test_the_policy_is_read_from_the_definition() -> None:
    plan = Plan(pipeline("a", "b", "c", quorum="50%", onLate="amend"))
    assert (plan.needed, plan.amends) == (2, True)


def test_a_worker_may_mean_a_task_by_several_names() -> None:
    plan = run_of(
        {
            "destinos": [
                "escavador_youtube",
                {"fila": "executador_relatorio", "id": "r"},
                {"fila": "escavador_blog", "id": "b1"},
                {"fila": "escavador_blog", "id": "b2"},
            ]
        }
    ).plan
    assert list(plan.named("escavador_youtube")) == [0]
    assert list(plan.named("youtube")) == [0]
    assert list(plan.named("r")) == [1]
    assert list(plan.named("executador_relatorio")) == [1]
    assert list(plan.named("relatorio")) == [1]
    assert list(plan.named("blog")) == [2, 3]
    assert list(plan.named("b2")) == [3]
    assert list(plan.named("nobody")) == []


def test_an_id_goes_before_a_queue_of_that_name() -> None:
    plan = run_of({"destinos": [{"fila": "a", "id": "x"}, {"fila": "b", "id": "a"}]}).plan
    assert list(plan.named("a")) == [1]


def test_a_bare_source_means_the_collector_when_both_have_it() -> None:
    plan = run_of({"destinos": ["executador_blog", "escavador_blog"]}).plan
    assert list(plan.named("blog")) == [1]
