"""`oraculo check-worker`: good workers pass, each bad one fails where it is bad, and nothing stays behind."""

import asyncio
import json
import subprocess
import sys
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from oraculo.bootstrap import make_broker
from oraculo.cli.app import app
from oraculo.cli.check_worker import print_report
from oraculo.ports.clock import SystemClock
from oraculo.settings import Settings
from oraculo.testing.worker_cases import CASE_NAMES, CaseReport, CaseState, CaseVerdict
from tests.brokers.nats_stage import plain_client
from tests.cli.processes import environment, run
from tests.cli.worker_check_stage import QUEUE, play
from tests.end_to_end.stage import settings_for
from tests.servers.fleet import ONE_BROKER, Fleet
from tests.servers.prepared import Oraculo
from tests.waiting import until

# -- workers with the SDK --------------------------------------------------------------------------------------------

SDK_WORKER = """
import msgspec
from oraculo.worker import App

app = App("verificado")


class Pedido(msgspec.Struct):
    produto: str


@app.queue("executador_x")
def work(pedido: Pedido) -> str:
    return pedido.produto
"""


@pytest.mark.parametrize("broker", ONE_BROKER)
def test_a_worker_with_the_sdk_passes(broker: str, fleet: Fleet, tmp_path: Path) -> None:
    (tmp_path / "meu_verificado.py").write_text(SDK_WORKER)
    (tmp_path / "pedido.json").write_text('{"produto": "café"}', "utf-8")
    env = {"ORACULO_BROKER_URL": fleet.url(broker), "ORACULO_PREFIX": f"t{uuid.uuid4().hex[:10]}."}
    with (tmp_path / "worker.log").open("wb") as log:
        command = ["worker", "meu_verificado:app"]
        worker = Oraculo(command, cwd=tmp_path, env=environment(**env), stdout=log, stderr=log)
    try:
        done = run("check-worker", "--queue", QUEUE, "--payload", "@pedido.json", cwd=tmp_path, env=env)
    finally:
        worker.kill()
        worker.wait(30)
    assert done.returncode == 0, (done.stdout, done.stderr, (tmp_path / "worker.log").read_text()[-2000:])
    *lines, summary = done.stdout.splitlines()[1:]
    states = {line[:14].strip(): line[16:].split()[0] for line in lines}
    assert summary == f"{QUEUE}: {len(CASE_NAMES)} ok, of {len(CASE_NAMES)} cases"
    assert states == dict.fromkeys(CASE_NAMES, "ok")
    assert "answered erro: " in done.stdout, "the empty payload lacks `produto`, and is refused in an answer"
    assert done.stderr == ""


@pytest.mark.parametrize("broker", ONE_BROKER)
def test_a_worker_that_is_not_there_is_one_line(broker: str, fleet: Fleet, tmp_path: Path) -> None:
    env = {"ORACULO_BROKER_URL": fleet.url(broker), "ORACULO_PREFIX": f"t{uuid.uuid4().hex[:10]}."}
    done = run("check-worker", "--queue", QUEUE, "--timeout", "0.5", cwd=tmp_path, env=env)
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"oraculo: {QUEUE}: no answer in 0.5 s; nobody reads ")


def test_the_summary_counts_what_came_of_the_cases(capsys: pytest.CaptureFixture[str]) -> None:
    states = (CaseState.PASSED, CaseState.NOTED, CaseState.FAILED, CaseState.SKIPPED, CaseState.SKIPPED)
    report = CaseReport([CaseVerdict(f"case {number}", state, "seen") for number, state in enumerate(states)], [])
    print_report("executador_x", report)
    *lines, summary = capsys.readouterr().out.splitlines()
    assert summary == "executador_x: 1 ok, 1 warning, 1 error, 2 skipped (no worker was left), of 5 cases"
    assert [line.split()[2] for line in lines[1:]] == ["ok", "warning", "error"]


# -- workers that are bad --------------------------------------------------------------------------------------------

PLAIN_WORKER = """
import contextlib, json, sys
import redis

url, prefix, how = sys.argv[1:]
queue, answers = prefix + "executador_x", prefix + "resultados"
client = redis.Redis.from_url(url, protocol=2)
with contextlib.suppress(redis.ResponseError):  # it is there already
    client.xgroup_create(queue, queue, id="0", mkstream=True)
group = queue
if how == "own group":
    client.xreadgroup(queue, "w", {queue: ">"}, count=1, block=1)  # somebody reads the queue, as far as it is said
    client.xgroup_create(queue, group := "workers", id="0")
field = "data" if how == "wrong field" else "body"
seen = set()


def answer_to(body):
    command = json.loads(body)
    answer = {
        "correlation_id": command["correlation_id"],
        "tarefa": command["tarefa"],
        "tipo_evento": "resultado_execucao",
        "timestamp": command["timestamp"],
        "payload": {"status": "ok"},
    }
    if how == "wrong id":
        answer["correlation_id"] = "outro"
    elif how == "wrong event":
        answer["tipo_evento"] = "resultado_coleta"
    elif how == "no timestamp":
        del answer["timestamp"]
    elif how in ("no tarefa", "answers twice, no tarefa"):
        del answer["tarefa"]
    elif how == "fails always":
        answer["payload"] = {"status": "erro", "erros": ["o banco caiu"]}
    elif how == "fails at a repeat" and command["correlation_id"] in seen:
        answer["payload"] = {"status": "erro", "erros": ["chave duplicada"]}
    elif how == "mute at no payload":
        assert command["payload"]
    elif how == "dies at unicode":
        command["payload"].get("texto", "").encode("ascii")
    seen.add(command["correlation_id"])
    return answer, command["responder_em"]


while True:
    for _, entries in client.xreadgroup(group, "w", {queue: ">"}, count=1, block=1000) or ():
        for entry, fields in entries:
            if how != "never acks" and (how != "never acks garbage" or fields[b"body"].startswith(b'{"corr')):
                client.xack(queue, group, entry)
                if group == queue:
                    client.xdel(queue, entry)
            if how == "never answers":
                continue
            try:
                answer, target = answer_to(fields[b"body"])
            except AssertionError:
                continue
            except (ValueError, KeyError, TypeError) as error:
                if how == "dies at unicode" or (how == "dies at garbage" and isinstance(error, ValueError)):
                    raise
                if how != "drops garbage":
                    client.xadd(queue + ".dlq", {"body": fields[b"body"], "reason": str(error)})
                continue
            if how == "reports its progress":
                progress = answer | {"tipo_evento": "progresso", "payload": {"percentual": 50}}
                client.xadd(target, {"body": json.dumps(progress)})
            body = "{not JSON" if how == "not JSON" else json.dumps(answer)
            client.xadd(answers if how == "answers on resultados" else target, {field: body})
            if how.startswith("answers twice"):
                client.xadd(target, {"body": body})
"""
DROPPED = {"no command": "aviso", "no object": "aviso", "not JSON": "aviso", "not UTF-8": "aviso"}


def all_from(case: str, state: str = "ignorada") -> dict[str, str]:
    return dict.fromkeys(CASE_NAMES[CASE_NAMES.index(case) + 1 :], state)


# For each kind of worker: the cases that are not simply `ok`, and what the first of those must say.
WORKERS: dict[str, tuple[dict[str, str], str]] = {
    "reports its progress": ({}, ""),
    "drops garbage": (DROPPED, "was dropped, or is still held: it belongs into"),
    "answers on resultados": ({"responder_em": "aviso"}, "which is allowed"),
    "no tarefa": ({"tarefa": "aviso"}, "known by its correlation_id alone"),
    "fails always": ({"command": "aviso"}, "o banco caiu"),
    "answers twice": ({"once": "aviso"}, "commands were answered more than once: the first answer counts"),
    "answers twice, no tarefa": ({"tarefa": "aviso", "once": "erro"}, "known by its correlation_id alone"),
    "wrong event": ({"tipo_evento": "erro"}, "answers with resultado_execucao"),
    "fails at a repeat": ({"repeated": "erro"}, "answered first ok, then erro: ['chave duplicada']"),
    "mute at no payload": ({"empty payload": "erro"}, "no answer in"),
    "dies at unicode": (
        {"unicode": "erro"} | all_from("unicode"),
        "a normal command is not answered any more",
    ),
    "dies at garbage": (
        {"not JSON": "erro"} | all_from("not JSON"),
        "after what is not JSON a normal command is not answered any more: no answer in",
    ),
    "never acks": ({"acked": "erro"}, "ack each command once its answer is confirmed"),
    "never acks garbage": ({"acked": "erro"}, "4 of the messages in"),
    "own group": ({"acked": "erro"}, "messages that were answered still wait in"),
    "never answers": ({"command": "erro"} | all_from("command"), "no answer in"),
    "wrong id": ({"command": "erro"} | all_from("command"), "correlation_id 'outro': copy it"),
    "no timestamp": ({"command": "erro"} | all_from("command"), "no valid message: timestamp: is required"),
    "not JSON": ({"command": "erro"} | all_from("command"), "not valid JSON"),
    "wrong field": (
        {"command": "erro"} | all_from("command"),
        "not valid JSON: it is empty; on Redis the JSON must be in the field `body`",
    ),
}
WAITED = 4.0  # seconds; under load a good answer must not come later


@dataclass(frozen=True)
class Outcome:
    report: CaseReport
    left: dict[str, int]  # what each queue still holds

    @property
    def states(self) -> dict[str, str]:
        return {verdict.name: str(verdict.state) for verdict in self.report.verdicts}

    def detail(self, name: str) -> str:
        return next(verdict.detail for verdict in self.report.verdicts if verdict.name == name)


@pytest.fixture
def outcomes(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """All of them at once: most of the time is spent waiting for what does not come."""
    url, script = fleet.url("redis"), tmp_path_factory.mktemp("plain") / "worker.py"
    script.write_text(PLAIN_WORKER)

    each = {how: settings_for(url) for how in WORKERS}
    workers = [
        subprocess.Popen([sys.executable, str(script), url, settings.broker.prefix, how], stderr=subprocess.DEVNULL)
        for how, settings in each.items()
    ]

    async def all_of_them() -> list[Outcome]:
        return await asyncio.gather(*map(checked, each.values()))

    try:
        return dict(zip(each, asyncio.run(all_of_them()), strict=True))
    finally:
        for worker in workers:
            worker.kill()
            worker.wait(30)


async def checked(settings: Settings) -> Outcome:
    prefix = settings.broker.prefix
    queues = [prefix + name for name in (QUEUE, "resultados", f"verificacao.{QUEUE}")]
    broker = make_broker(settings, SystemClock())

    async def worker_reads() -> bool:
        return any(state.consumers for state in await broker.queues(queues[:1]))

    try:
        await broker.start()
        await until(worker_reads, within=60, saying="the worker to read its queue")
        report = await play(broker, prefix, timeout=WAITED, payload={"a": 1})
        left = {state.queue: state.ready + state.dead_letters for state in await broker.queues(queues)}
    finally:
        await broker.close()
    return Outcome(report, left)


def test_plain_workers_fail_exactly_where_they_are_bad_and_nothing_stays_behind(outcomes: dict[str, Outcome]) -> None:
    """One test, so that no two processes play all of it."""
    for how, (odd, said) in WORKERS.items():
        outcome = outcomes[how]
        assert outcome.states == dict.fromkeys(CASE_NAMES, "ok") | odd, (how, outcome.report)
        assert outcome.report.has_passed is not bool({"erro", "ignorada"} & set(odd.values())), how
        assert said in outcome.detail(next((name for name in CASE_NAMES if name in odd), "command")), how
        assert len(outcome.left) == 3
        assert set(outcome.left.values()) == {0}, (how, outcome.left)
    assert "without their tarefa" in outcomes["answers twice, no tarefa"].detail("once")
    assert outcomes["dies at garbage"].detail("not UTF-8") == "not played: see not JSON"


async def test_a_worker_that_reads_beside_a_queue_of_nats_fails_and_nothing_stays_behind(fleet: Fleet) -> None:
    """By a plain subscription: what it gets stays in the stream."""
    settings = settings_for(fleet.url("nats"))
    queue = settings.broker.prefix + QUEUE
    ours = make_broker(settings, SystemClock())
    await ours.start()
    try:
        async with plain_client(fleet.url("nats")) as client:

            async def work(message: Any) -> None:
                with suppress(ValueError, KeyError, TypeError):  # what is no command
                    command = json.loads(message.data)
                    answer = {key: command[key] for key in ("correlation_id", "timestamp", "tarefa")}
                    answer |= {"tipo_evento": "resultado_execucao", "payload": {}}
                    await client.publish(command["responder_em"], json.dumps(answer).encode())

            await client.subscribe(queue, cb=work)
            await client.flush()
            report = await play(ours, settings.broker.prefix, timeout=WAITED)
        verdict = report.verdicts[-1]
        assert (verdict.name, verdict.state) == ("acked", "erro"), report.verdicts
        assert f"still wait in {queue}: the worker reads beside the queue" in verdict.detail
        (state,) = await ours.queues([queue])
        assert (state.ready, state.unacked, state.dead_letters) == (0, 0, 0)
    finally:
        await ours.close()


def test_a_failed_case_is_1_and_is_asked_to_programs_and_to_people(fleet: Fleet, tmp_path: Path) -> None:
    env = {"ORACULO_BROKER_URL": fleet.url("redis"), "ORACULO_PREFIX": f"t{uuid.uuid4().hex[:10]}."}
    arguments = ("check-worker", "--queue", QUEUE, "--timeout", "0.2")
    document, table = (run(*arguments, *more, cwd=tmp_path, env=env) for more in (("--json",), ()))
    assert (document.returncode, table.returncode) == (1, 1)
    said = json.loads(document.stdout)
    assert (said["fila"], said["passou"], said["avisos"]) == (QUEUE, False, [])
    assert said["responder_em"] == f"{env['ORACULO_PREFIX']}verificacao.{QUEUE}"
    assert said["casos"][0] == {"nome": "command", "estado": "erro", "detalhe": said["casos"][0]["detalhe"]}
    assert "is the worker running" in said["casos"][0]["detalhe"]
    [line] = table.stderr.splitlines()
    assert (table.stdout, "is the worker running" in line) == ("", True)


# -- usage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "url", "said"),
    [
        ((), "redis://127.0.0.1:9", "--queue"),
        (("--queue", QUEUE), "memory://", "memory:// lives inside one process"),
        (("--queue", "resultados"), "redis://127.0.0.1:9", "the orchestrator's own queue"),
        (("--queue", "com espaço"), "redis://127.0.0.1:9", "--queue: must be 1 to 128 letters"),
        (("--queue", QUEUE, "--payload", "[1]"), "redis://127.0.0.1:9", "--payload: must be a JSON object"),
        (("--queue", QUEUE, "--payload", "{"), "redis://127.0.0.1:9", "--payload: must be a JSON object"),
        (("--queue", QUEUE, "--payload", "@none.json"), "redis://127.0.0.1:9", "none.json: cannot be read"),
        (("--queue", QUEUE, "--payload", "-"), "redis://127.0.0.1:9", "from stdin: must be a JSON object"),
        (("--queue", QUEUE, "--timeout", "0"), "redis://127.0.0.1:9", "--timeout"),
        (("--queue", QUEUE), "redis://127.0.0.1:9", "mend ORACULO_BROKER_URL"),
        (("--queue", QUEUE), "amqp://u:secret@127.0.0.1:9,nats://127.0.0.1:9", "mend ORACULO_BROKER_URL"),
    ],
)
def test_bad_usage_is_one_line_and_2(
    arguments: tuple[str, ...], url: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oraculo.telemetry.logs.configure_logging", lambda _settings: None)
    result = CliRunner().invoke(app, ["check-worker", *arguments], env={"ORACULO_BROKER_URL": url})
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("oraculo: ")
    assert said in line
    assert "secret" not in line
