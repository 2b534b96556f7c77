"""People read local time with its zone; the wire has UTC."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from oraculo.cli import times
from oraculo.cli.run_table import print_aggregate
from oraculo.errors import InvalidInput

NOON = datetime.now(UTC).replace(hour=15, minute=0, second=5, microsecond=0)  # noon in São Paulo, on the same day


@pytest.fixture(autouse=True)
def _in_sao_paulo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "America/Sao_Paulo")
    time.tzset()
    monkeypatch.setattr(times, "_now", lambda: NOON.astimezone())
    yield
    monkeypatch.undo()
    time.tzset()


def iso(when: datetime) -> str:
    return when.isoformat().replace("+00:00", "Z")


def test_a_moment_has_its_zone_and_a_date_unless_it_is_today() -> None:
    assert times.moment(iso(NOON)) == "12:00:05 -03"
    assert times.moment("2024-01-31T02:00:00.123Z") == "2024-01-30 23:00:00 -03"
    assert times.moment(None) == "-"


def test_a_column_of_moments_names_the_zone_once() -> None:
    assert times.moments("started", [iso(NOON), None]) == ("started -03", ["12:00:05", "-"])
    old = times.moments("started", ["2024-01-31T02:00:00Z"])
    assert old == ("started -03", ["2024-01-30 23:00"])


def test_zones_that_differ_stand_with_each_moment() -> None:
    summer, winter = "2018-01-10T12:00:00Z", "2018-07-10T12:00:00Z"
    assert times.moments("since", [summer, winter]) == ("since", ["2018-01-10 10:00 -02", "2018-07-10 09:00 -03"])


def test_moments_in_a_sentence_of_the_server_become_local() -> None:
    said = f"it waits until {iso(NOON)} (30 s from now), when it ends"
    assert times.localized(said) == "it waits until 12:00:05 -03 (30 s from now), when it ends"


@pytest.mark.parametrize(
    ("milliseconds", "said"),
    [
        (None, "-"),
        (0, "0 ms"),
        (17, "17 ms"),
        (900, "0.9 s"),
        (8_000, "8 s"),
        (63_000, "1 min 3 s"),
        (7_500_000, "2 h 5 min"),
    ],
)
def test_durations_are_human(milliseconds: int | None, said: str) -> None:
    assert times.duration(milliseconds) == said


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("2h", NOON - timedelta(hours=2)),
        ("90 min", NOON - timedelta(minutes=90)),
        ("11:30", NOON.replace(hour=14, minute=30, second=0)),
        ("2024-01-31", datetime(2024, 1, 31, 3, tzinfo=UTC)),
        ("2024-01-31 14:30", datetime(2024, 1, 31, 17, 30, tzinfo=UTC)),
        ("2024-01-31T14:30:00+01:00", datetime(2024, 1, 31, 13, 30, tzinfo=UTC)),
    ],
)
def test_a_moment_is_read_as_people_write_it(text: str, meant: datetime) -> None:
    assert times.moment_option("--since", text) == iso(meant)


@pytest.mark.parametrize("text", ["ontem", "", "25:00", "99999999999999999d"])
def test_what_is_no_moment_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"--since: .*write it as 2h"):
        times.moment_option("--since", text)


def test_moments_in_the_reason_of_a_timeout_become_local(capsys: pytest.CaptureFixture[str]) -> None:
    reason = f"no answer in 20 s; its consumer is paused at the server until {iso(NOON)}"
    summary = {"total": 1, "concluidas": 0, "erros": 0, "timeouts": 1, "ignoradas": 0, "canceladas": 0}
    failures = {"executador_x": {"status": "timeout", "motivo": reason, "tentativas": 1}}
    run = {"correlation_id": "c", "status": "timeout", "resumo": summary, "resultados": {}, "falhas": failures}
    print_aggregate(run)
    assert "12:00:05 -03" in " ".join(capsys.readouterr().out.split())
