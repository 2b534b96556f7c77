"""The client commands against a running `oraculo dev`."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from oraculo.errors import BrokerError
from oraculo.ports.broker import BrokerStatus
from tests.api.live import live
from tests.cli.processes import Cli, Process, until

SLOW_QUEUE = "ninguem"  # nobody listens there: a run that stays open


def test_dev_says_where_it_is_and_what_to_try(dev: Process) -> None:
    said = "".join(dev.lines)
    for words in (dev.url, ".oraculo/oraculo.db", "curl", "oraculo runs list", "oraculo runs watch", "images-queue"):
        assert words in said


def test_the_sample_runs_end_as_announced(cli: Cli) -> None:
    def ends() -> list[str]:
        runs = cli.json("runs", "list", "--limit", "500")["orquestracoes"]
        return [run["status"] for run in runs[-5:]]

    # Newest first: always fails, nobody serves, fails twice, pipeline, fan-out.
    wanted = ["erro", "parcial", "concluida", "concluida", "concluida"]
    until(lambda: ends() == wanted, saying="the end of the sample runs")


# -- submit ----------------------------------------------------------------------------------------------------------


def test_submit_and_wait_prints_the_answers_and_ends_with_0(cli: Cli) -> None:
    said = cli.ok("submit", "--tipo", "coleta_completa", "--wait", "20")
    assert "concluida: 3 of 3" in said
    assert "relatorio.pdf" in said


def test_submit_as_json_prints_the_aggregate_and_nothing_else(cli: Cli) -> None:
    aggregate = cli.json("submit", "--destino", "escavador_blog", "--wait", "20")
    assert aggregate["status"] == "concluida"
    assert list(aggregate["resultados"]) == ["escavador_blog"]


@pytest.mark.parametrize(
    ("payload", "status"),
    [('{"simular": {"falhar": true}}', "erro"), ('{"simular": {"falhar": true, "fila": "escavador_blog"}}', "parcial")],
)
def test_a_run_that_did_not_succeed_ends_with_1(cli: Cli, payload: str, status: str) -> None:
    result = cli("submit", "--tipo", "coleta_completa", "--payload", payload, "--wait", "20", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["status"] == status


def test_a_run_that_has_not_ended_in_time_ends_with_1_and_goes_on(cli: Cli) -> None:
    result = cli("submit", "--destino", SLOW_QUEUE, "--wait", "1", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["status"] == "em_execucao"
    assert "has not ended in 1 s" in result.stderr


def test_submit_without_wait_ends_with_0_and_names_the_run(cli: Cli) -> None:
    result = cli("submit", "--destino", SLOW_QUEUE, "--correlation-id", "pedido-um")
    assert (result.exit_code, result.stdout) == (0, "run pedido-um em_execucao\n")
    assert result.stderr == "follow it with: oraculo runs watch pedido-um\n"


def test_what_follows_a_submission_names_the_server_that_the_command_named(cli: Cli) -> None:
    args = ("submit", "--destino", SLOW_QUEUE, "--correlation-id", "pedido dois", "--url", cli.url)
    result = cli(*args, env={"ORACULO_URL": "http://127.0.0.1:9"})
    assert result.stderr == f"follow it with: oraculo runs watch 'pedido dois' --url {cli.url}\n"


def test_every_option_of_a_submission_arrives(cli: Cli) -> None:
    run_id = cli.submitted(
        *("--destino", SLOW_QUEUE, "--destino", '{"id": "outra", "fila": "ninguem", "timeout": 50}'),
        *("--timeout", "60", "--prioridade", "7", "--quorum", "50%"),
        *("--webhook", "http://127.0.0.1:9/hook", "--responder-em", "respostas"),
    )
    run = cli.json("runs", "show", run_id)
    assert [task["id"] for task in run["tarefas"]] == [SLOW_QUEUE, "outra"]
    assert run["prioridade"] == 7
    assert {(each["canal"], each["destino"]) for each in run["entregas"]} == {
        ("webhook", "http://127.0.0.1:9/hook"),
        ("fila", "respostas"),
    }
    assert "quorum 1" in cli.ok("runs", "explain", run_id)


def test_a_payload_comes_from_a_file_or_stdin(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text('{"entrada": 1, "produto": "Chá"}')
    for args, text in ((["--payload", "@p.json"], None), (["--payload", "-"], '{"produto": "Chá"}')):
        said = cli.ok("submit", "--destino", "text-queue", "--wait", "20", *args, input=text)
        assert "Chá: você nunca provou" in said


def test_the_same_command_with_the_same_id_gives_the_same_run(cli: Cli) -> None:
    args = ("--destino", SLOW_QUEUE, "--correlation-id", "minha-corrida")
    first, again = (cli("submit", *args) for _ in range(2))
    assert (first.exit_code, again.exit_code) == (0, 0), again.stderr
    other = cli("submit", "--destino", "outro", "--correlation-id", "minha-corrida")
    assert other.exit_code == 2
    assert "correlation_id 'minha-corrida' is in use" in other.stderr


def test_the_same_idempotency_key_gives_the_same_run(cli: Cli) -> None:
    args = ("--destino", SLOW_QUEUE, "--idempotency-key", "chave-1")
    assert cli.submitted(*args) == cli.submitted(*args)
    other = cli("submit", "--destino", "outro", "--idempotency-key", "chave-1")
    assert other.exit_code == 2
    assert other.stderr.startswith("oraculo: Idempotency-Key: ")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["submit", "--tipo", "colta_completa"], "tipo: "),
        (["submit", "--destino", "bad name"], "destinos[0]"),
        (["submit", "--destino", "x", "--timeout", "-1"], "timeout: "),
        (["submit", "--destino", "x", "--idempotency-key", ""], "Idempotency-Key"),
        (["runs", "show", "no-such-run"], "no-such-run"),
        (["runs", "watch", "no-such-run"], "no-such-run"),
        (["runs", "explain", "no-such-run"], "no-such-run"),
        (["runs", "cancel", "no-such-run"], "no-such-run"),
        (["runs", "retry", "no-such-run"], "no-such-run"),
        (["runs", "list", "--status", "bom"], "status: "),
        (["runs", "list", "--cursor", "bom"], "cursor"),
        (["pipelines", "show", "promotional-video-ful"], "did you mean 'promotional-video-full'"),
        (["dlq", "list", "no-such-queue"], "no-such-queue"),
        (["dlq", "redrive", "no-such-queue"], "no-such-queue"),
        (["dlq", "discard", "text-queue", "1"], "text-queue"),
        (["dlq", "show", "text-queue", "1"], "text-queue"),
    ],
)
def test_what_the_server_refuses_is_one_line_and_2(cli: Cli, args: list[str], words: str) -> None:
    result = cli(*args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert words in result.stderr


# -- runs ------------------------------------------------------------------------------------------------------------


def test_runs_are_listed_by_page_status_and_text(cli: Cli) -> None:
    for number in range(3):
        cli.submitted("--destino", SLOW_QUEUE, "--correlation-id", f"pagina-{number}")
    page = cli.json("runs", "list", "-q", "pagina-", "--limit", "2", "--status", "em_execucao")
    assert [run["correlation_id"] for run in page["orquestracoes"]] == ["pagina-2", "pagina-1"]
    rest = cli.json("runs", "list", "-q", "pagina-", "--limit", "2", "--cursor", page["cursor"])
    assert [run["correlation_id"] for run in rest["orquestracoes"]] == ["pagina-0"]
    text = cli("runs", "list", "-q", "pagina-", "--limit", "2")
    assert [line.split()[0] for line in text.stdout.splitlines()] == ["id", "pagina-2", "pagina-1"]
    assert "--cursor" in text.stderr
    both = cli.json("runs", "list", "-q", "pagina-", "--status", "em_execucao,erro", "--since", "1h")
    assert len(both["orquestracoes"]) == 3
    assert cli.json("runs", "list", "-q", "pagina-", "--until", "2020-01-31 14:30")["orquestracoes"] == []


def test_an_empty_list_is_no_error(cli: Cli) -> None:
    result = cli("runs", "list", "-q", "nothing-like-this")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "no runs\n")


def test_show_shows_the_tasks_and_what_came_of_the_run(cli: Cli) -> None:
    run_id = cli.json("submit", "--pipeline", "voice-over-only", "--wait", "20")["correlation_id"]
    said = cli.ok("runs", "show", run_id)
    assert " concluida: 2 of 2" in said
    assert "pipeline voice-over-only, started " in said
    assert "voiceover-queue" in said
    assert "locucao.mp3" in said


def test_explain_says_that_nobody_listens(cli: Cli) -> None:
    run_id = cli.submitted("--destino", SLOW_QUEUE)
    until(lambda: "nobody listens on queue ninguem" in cli.ok("runs", "explain", run_id), saying="the explanation")
    assert run_id in cli.json("runs", "explain", run_id)["explicacao"]


def test_cancel_ends_a_run_once(cli: Cli) -> None:
    run_id = cli.submitted("--destino", SLOW_QUEUE)
    assert cli.ok("runs", "cancel", run_id) == f"run {run_id} cancelada\n"
    again = cli("runs", "cancel", run_id)
    assert again.exit_code == 2
    assert "cancelada" in again.stderr


def test_retry_runs_what_failed_again(cli: Cli) -> None:
    payload = '{"simular": {"falhas": 4}}'  # three attempts fail, and of the next three the second succeeds
    run_id = json.loads(cli("submit", "--destino", "text-queue", "--payload", payload, "--wait", "20", "--json").stdout)
    run_id = run_id["correlation_id"]
    assert cli.status(run_id) == "erro"
    assert cli.json("runs", "retry", run_id)["status"] == "em_execucao"
    cli.ended(run_id, "concluida")
    assert cli.json("runs", "show", run_id)["tarefas"][0]["tentativas"] == 5


# -- watch -----------------------------------------------------------------------------------------------------------


def test_watch_shows_each_event_in_a_line_until_the_end(cli: Cli) -> None:
    run_id = cli.submitted("--pipeline", "promotional-video-full")
    lines = cli.ok("runs", "watch", run_id).splitlines()
    assert "orquestracao_iniciada" in lines[0]
    assert any("progresso" in line and "PROMOTIONAL_VIDEO" in line and "100 % pronto" in line for line in lines)
    assert sum("tarefa_concluida" in line for line in lines) == 5
    assert lines[-1].startswith(f"run {run_id} concluida: 5 of 5")


def test_watch_of_an_ended_run_shows_it_again_and_its_status_is_the_exit_status(cli: Cli) -> None:
    payload = '{"simular": {"falhar": true, "fila": "escavador_blog"}}'
    result = cli("submit", "--tipo", "coleta_completa", "--payload", payload, "--wait", "20", "--json")
    watched = cli("runs", "watch", json.loads(result.stdout)["correlation_id"])
    assert watched.exit_code == 1
    assert "tentativa_falhou  escavador_blog  attempt 1" in watched.stdout
    assert "parcial: 2 of 3 (1 error)" in watched.stdout.splitlines()[-1]


def test_watch_as_json_is_an_object_a_line_and_the_run_last(cli: Cli) -> None:
    run_id = cli.submitted("--destino", "text-queue")
    entries = [json.loads(line) for line in cli.ok("runs", "watch", run_id, "--json").splitlines()]
    assert [entry["seq"] for entry in entries[:-1]] == list(range(1, len(entries)))
    assert entries[-1]["evento"] == "fim"
    assert entries[-1]["orquestracao"]["status"] == "concluida"


# -- dead letters ----------------------------------------------------------------------------------------------------


def dead_letter(cli: Cli, payload: str) -> dict[str, str]:
    done = cli("submit", "--destino", "captions-queue", "--payload", payload, "--wait", "20", "--json")
    run_id = json.loads(done.stdout)["correlation_id"]

    def found() -> dict[str, str] | None:
        letters = cli.json("dlq", "list", "captions-queue")["mensagens"]
        return next((letter for letter in letters if letter["correlation_id"] == run_id), None)

    return until(found, saying="the dead letter")


def test_a_dead_letter_is_listed_shown_and_discarded(cli: Cli) -> None:
    letter = dead_letter(cli, '{"simular": {"falhar": true}}')
    assert "captions-queue" in cli.ok("dlq", "list")
    assert any(queue["fila"] == "captions-queue" for queue in cli.json("dlq", "list")["filas"])
    assert letter["correlation_id"] in cli.ok("dlq", "list", "captions-queue")
    shown = cli.ok("dlq", "show", "captions-queue", letter["id"])
    assert "falha simulada" in shown
    assert "iniciar_execucao" in shown
    assert cli.json("dlq", "show", "captions-queue", letter["id"]) == letter
    assert cli.json("dlq", "discard", "captions-queue", letter["id"])["descartada"]
    assert letter["id"] not in [each["id"] for each in cli.json("dlq", "list", "captions-queue")["mensagens"]]


def test_redrive_opens_the_run_again_and_it_succeeds(cli: Cli) -> None:
    first, second = (dead_letter(cli, '{"simular": {"falhas": 3}}') for _ in range(2))
    assert cli.status(first["correlation_id"]) == "erro"
    done = cli.json("dlq", "redrive", "captions-queue", first["id"])
    assert done == {"reenviadas": 0, "reabertas": 1, "obsoletas": 0}
    cli.ended(first["correlation_id"], "concluida")
    assert cli.status(second["correlation_id"]) == "erro", "only the one that was named"
    assert "1 task opened again" in cli.ok("dlq", "redrive", "captions-queue"), "all that are left"
    cli.ended(second["correlation_id"], "concluida")


@pytest.fixture
def one_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cli]:
    """A server that has two brokers, of which one is away."""
    with live(tmp_path) as server:
        server.do(server.service.broker.declare(["fila_x"]))
        links = [BrokerStatus("rabbitmq", "connection refused"), BrokerStatus("redis", None)]
        monkeypatch.setattr(server.service.broker, "statuses", lambda: links)
        yield Cli(server.url)


def test_that_a_broker_is_away_whose_dead_letters_are_not_listed_is_reported(one_away: Cli) -> None:
    away = "broker rabbitmq is away: its dead letters are not listed"
    for queue, empty in (((), "no dead letters"), (("fila_x",), "queue fila_x has no dead letters")):
        result = one_away("dlq", "list", *queue)
        assert result.exit_code == 0
        assert result.stderr.splitlines() == [away, f"{empty} at the brokers that work"]
        as_json = one_away("dlq", "list", *queue, "--json")
        assert as_json.stderr.splitlines() == [away]
        assert [] in json.loads(as_json.stdout).values()


def test_the_only_broker_is_not_said_to_be_away_though_it_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with live(tmp_path) as server:
        server.do(server.service.bury("fila_x", b"{}"))
        monkeypatch.setattr(server.service.broker, "statuses", lambda: [BrokerStatus("rabbitmq", "out of memory")])
        result = Cli(server.url)("dlq", "list", "fila_x")
    assert (result.exit_code, result.stderr) == (0, "")


def test_that_a_broker_is_away_whose_dead_letters_are_not_sent_again_is_reported(one_away: Cli) -> None:
    result = one_away("dlq", "redrive", "fila_x")
    assert (result.exit_code, result.stdout.count("0 tasks opened again")) == (0, 1)
    assert result.stderr.splitlines() == ["broker rabbitmq is away: its dead letters are not sent again"]


def test_that_a_broker_is_away_whose_dead_letter_may_be_meant_is_said(one_away: Cli) -> None:
    result = one_away("dlq", "show", "fila_x", "rabbitmq:7")
    away, missing = result.stderr.splitlines()
    assert (result.exit_code, away) == (2, "broker rabbitmq is away: its dead letters are not shown")
    assert "rabbitmq:7" in missing


def test_dead_letters_are_shown_where_the_server_may_not_list_queues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse() -> None:
        raise BrokerError("not allowed to list")

    with live(tmp_path) as server:
        server.do(server.service.bury("fila_x", b"{}", "broken on purpose"))
        monkeypatch.setattr(server.service.operations, "queues", refuse)
        assert "broken on purpose" in Cli(server.url).ok("dlq", "list", "fila_x")


def test_the_tracebacks_of_failed_attempts_are_shown_where_they_are_asked_for(tmp_path: Path) -> None:
    trace = 'Traceback (most recent call last):\n  File "loja.py", line 3\nValueError: \x1b[2J'
    with live(tmp_path) as server:
        cli, service = Cli(server.url), server.service
        run_id = cli.submitted("--destino", "fila_x")
        answer = {"status": "erro", "erros": ["no"], "repetir": False, "rastreamento": trace}
        server.do(service.answer("fila_x", answer))
        server.do(service.ended(run_id))
        assert "Traceback" not in cli.ok("runs", "show", run_id)
        said = cli.ok("runs", "show", run_id, "--verbose")
        assert "\nfila_x, attempt 1, failed " in said
        shown = '  Traceback (most recent call last):\n    File "loja.py", line 3\n  ValueError: \ufffd[2J\n'
        assert said.endswith(f":\n{shown}")
        [traced] = cli.json("runs", "show", run_id, "--verbose")["rastreamentos"]
        assert (traced["tarefa"], traced["tentativa"], traced["rastreamento"]) == ("fila_x", 1, trace)


# -- pipelines and doctor --------------------------------------------------------------------------------------------


def test_pipelines_are_listed(cli: Cli) -> None:
    assert "promotional-video-full" in cli.ok("pipelines", "list")
    assert len(cli.json("pipelines", "list")["pipelines"]) == 8


def test_a_queue_that_nobody_serves_is_warned_of_when_a_server_is_named(cli: Cli, tmp_path: Path) -> None:
    steps = "[{type: executador_ninguem}, {type: celery://x.y}, {type: escavador_blgo}]"
    (tmp_path / "a.yaml").write_text(f"name: a\nsteps: {steps}\n")
    unserved, mistyped = (
        "nobody listens on queue 'executador_ninguem' now",
        "nobody listens on queue 'escavador_blgo' now",
    )
    assert cli.json("pipelines", "validate", "a.yaml")["arquivos"][0]["avisos"] == [
        {"campo": "steps[0] (executador_ninguem).queue", "motivo": unserved},
        {"campo": "steps[2] (escavador_blgo).queue", "motivo": f"{mistyped}; did you mean 'escavador_blog'?"},
    ]


def test_a_shown_pipeline_is_a_file_that_validates(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "shown.yaml").write_text(cli.ok("pipelines", "show", "promotional-video-full"))
    validated = cli.ok("pipelines", "validate", "shown.yaml")
    assert validated.startswith("shown.yaml: ok, pipeline promotional-video-full\n")
    assert cli.json("pipelines", "show", "promotional-video-full")["name"] == "promotional-video-full"


def test_doctor_finds_the_server_ready(cli: Cli) -> None:
    report = cli.json("doctor")
    states = {check["nome"]: check["estado"] for check in report["verificacoes"]}
    assert states["server"] == states["broker memory"] == states["store sqlite"] == states["python"] == "ok"
    assert report["configuracao"]["broker.url"] == "memory://"
