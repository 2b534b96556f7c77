"""The command line on a real terminal of 80 columns."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from oraculo.api import replies
from tests.api.live import live
from tests.cli.processes import Cli
from tests.cli.terminal import COLUMNS, Terminal, shown

SLOW_QUEUE = "ninguem"


def ended(cli: Cli, *args: str) -> str:
    """Submit and wait, and return the run's id."""
    return str(json.loads(cli("submit", *args, "--wait", "20", "--json").stdout)["correlation_id"])


def test_no_list_is_wider_than_the_terminal_nor_breaks_an_id(cli: Cli, tmp_path: Path) -> None:
    run_id = ended(cli, "--pipeline", "promotional-video-full", "--payload", '{"simular": {"falhar": true}}')
    letters = cli.json("dlq", "list", "images-queue")["mensagens"]
    letter = next(each for each in letters if each["correlation_id"] == run_id)
    for command, whole in (
        ("runs list", run_id),
        (f"runs show {run_id}", "ENHANCED_IMAGES"),
        ("dlq list images-queue", letter["id"]),
        ("dlq list", "images-queue"),
        ("queues list", "executador_relatorio"),
        ("pipelines list", "promotional-video-with-voiceover"),
    ):
        lines = shown(*command.split(), cwd=tmp_path, url=cli.url)
        assert any(whole in line.split() for line in lines), lines
        head = next(number for number, line in enumerate(lines) if line.startswith(("id ", "task ", "queue ", "name ")))
        assert max(map(len, lines[head:])) <= COLUMNS, lines


def test_a_dead_letter_is_one_line_and_what_was_cut_is_said(cli: Cli, tmp_path: Path) -> None:
    ended(cli, "--destino", "text-queue", "--payload", '{"simular": {"falhar": true}}')
    lines = shown("dlq", "list", "text-queue", cwd=tmp_path, url=cli.url)
    letters = cli.json("dlq", "list", "text-queue")["mensagens"]
    assert [line.split()[0] for line in lines[1 : len(letters) + 1]] == [letter["id"] for letter in letters]
    assert lines[-1].startswith("left out: run") or "cut: reason" in lines[-1]


def test_a_run_is_one_table(cli: Cli, tmp_path: Path) -> None:
    run_id = ended(
        cli, "--tipo", "coleta_completa", "--payload", '{"simular": {"falhar": true, "fila": "escavador_blog"}}'
    )
    lines = shown("runs", "show", run_id, cwd=tmp_path, url=cli.url)
    assert lines[0].startswith(f"run {run_id} parcial: 2 of 3 (1 error) in ")
    assert re.match(r"pipeline coleta_completa, started \d\d:\d\d:\d\d UTC, ended \d\d:\d\d:\d\d UTC$", lines[1])
    assert [line.split()[0] for line in lines if line.startswith(("task ", "esc", "exe"))] == [
        "task",
        "escavador_youtube",
        "escavador_blog",
        "executador_relatorio",
    ]


def test_submit_and_wait_names_the_run_at_once_and_draws_its_tasks(cli: Cli, tmp_path: Path) -> None:
    args = ("submit", "--destino", SLOW_QUEUE, "--destino", "text-queue", "--wait", "60")
    with Terminal(*args, cwd=tmp_path, url=cli.url) as terminal:
        terminal.says(f"{SLOW_QUEUE}     em_execucao")
        terminal.says("in the queue")
        run_id = terminal.text.split()[1]
        assert terminal.text.startswith(f"run {run_id} em_execucao\n")
        terminal.interrupt()
        assert terminal.ends() == 130
        assert f"run {run_id} goes on; follow it with:\n  oraculo runs watch {run_id}\n" in terminal.text
    assert cli.status(run_id) == "em_execucao"


def test_ctrl_c_leaves_a_watched_run_alone(cli: Cli, tmp_path: Path) -> None:
    run_id = cli.submitted("--destino", SLOW_QUEUE)
    with Terminal("runs", "watch", run_id[:13], cwd=tmp_path, url=cli.url) as terminal:
        terminal.says("1 em_execucao")
        terminal.interrupt()
        assert terminal.ends() == 130
        assert f"run {run_id} goes on" in terminal.text
        assert "Traceback" not in terminal.text
    assert cli.status(run_id) == "em_execucao"


@pytest.mark.parametrize(("answer", "status", "code"), [("n", "em_execucao", 1), ("y", "cancelada", 0)])
def test_many_runs_are_cancelled_after_a_look_and_a_question(
    cli: Cli, tmp_path: Path, answer: str, status: str, code: int
) -> None:
    runs = [cli.submitted("--destino", SLOW_QUEUE, "--correlation-id", f"muitas-{answer}-{n}") for n in range(3)]
    with Terminal("runs", "cancel", "-q", f"muitas-{answer}", cwd=tmp_path, url=cli.url) as terminal:
        terminal.says("Cancel 3 runs? [y/N]")
        assert all(run_id in terminal.text for run_id in runs)
        terminal.types(f"{answer}\n")
        assert terminal.ends() == code
        assert ("cancelling: 3 runs done" if code == 0 else "nothing was done") in terminal.text
        assert ("100%" in terminal.text) == (code == 0), "a progress bar"
    assert [cli.status(run_id) for run_id in runs] == [status] * 3


# -- without a terminal ----------------------------------------------------------------------------------------------


def test_where_nobody_can_answer_many_are_not_touched_without_yes(cli: Cli) -> None:
    run_id = cli.submitted("--destino", SLOW_QUEUE, "--correlation-id", "sem-terminal")
    asked = cli("runs", "cancel", "--query", "sem-terminal")
    assert (asked.exit_code, "--yes" in asked.stderr) == (2, True)
    assert cli.status(run_id) == "em_execucao"
    done = cli.json("runs", "cancel", "--query", "sem-terminal", "--yes")
    assert done == {"orquestracoes": [run_id], "recusadas": {}}
    assert cli.json("runs", "retry", "--query", "sem-terminal", "--yes")["orquestracoes"] == [run_id]


def test_an_action_takes_an_id_or_a_filter(cli: Cli) -> None:
    for args in ((), ("some-run", "--status", "erro")):
        result = cli("runs", "retry", *args)
        assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)


def test_an_id_may_be_shortened_while_only_one_run_has_it(cli: Cli) -> None:
    whole = [cli.submitted("--destino", SLOW_QUEUE, "--correlation-id", f"curta-{letter}-resto") for letter in "ab"]
    assert cli.json("runs", "show", "curta-a")["correlation_id"] == whole[0]
    assert cli.ok("runs", "cancel", "curta-b") == f"run {whole[1]} cancelada\n"
    several = cli("runs", "show", "curta")
    assert several.exit_code == 2
    assert "'curta' is the beginning of 2 ids: curta-b-resto, curta-a-resto; give more of it" in several.stderr
    assert "there is no run" in cli("runs", "show", "urta-a").stderr, "not the beginning"


@pytest.fixture
def letters(tmp_path: Path) -> Iterator[Cli]:
    """A server with twelve dead letters."""
    with live(tmp_path) as server:
        for number in range(12):
            server.do(server.service.bury("fila_x", b"{}", f"broken {number}"))
        yield Cli(server.url)


def test_all_dead_letters_of_a_queue_are_discarded(letters: Cli) -> None:
    asked = letters("dlq", "discard", "fila_x", "--all")
    assert (asked.exit_code, "Discard 12 dead letters of queue fila_x for good?" in asked.stderr) == (2, True)
    assert letters.ok("dlq", "discard", "fila_x", "--all", "--yes") == "queue fila_x: 12 dead letters discarded\n"
    assert letters.json("dlq", "list")["filas"] == []
    assert letters("dlq", "discard", "fila_x").exit_code == 2, "nothing is named"


def test_that_a_body_was_cut_is_said(tmp_path: Path) -> None:
    with live(tmp_path) as server:
        server.do(server.service.bury("fila_x", b'{"correlation_id": "r", "x": "' + b"a" * 2**20 + b'"}'))
        server.do(server.service.bury("fila_x", b"{}"))
        cli = Cli(server.url)
        listed = cli("dlq", "list", "fila_x")
        assert listed.stderr == "the server cuts bodies over 1 MiB: that of 1 dead letter here\n"
        large, small = cli.json("dlq", "list", "fila_x")["mensagens"]
        shown = cli("dlq", "show", "fila_x", large["id"])
        assert shown.stderr == "the body has 1,048,608 bytes; the server shows its beginning only\n"
        assert cli("dlq", "show", "fila_x", small["id"]).stderr == ""


def test_every_pipeline_is_listed_however_many_pages_they_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with live(tmp_path) as server:
        cli = Cli(server.url)
        whole = cli.json("pipelines", "list")
        monkeypatch.setattr(replies, "PAGE_BYTES", 1)
        assert cli.json("pipelines", "list") == whole


def test_the_number_of_a_dead_letter_is_never_taken_for_another(letters: Cli) -> None:
    ids = [letter["id"] for letter in letters.json("dlq", "list", "fila_x")["mensagens"]]
    longest = max(ids, key=len)
    missing = next(longest[:cut] for cut in range(1, len(longest)) if longest[:cut] not in ids)
    assert letters("dlq", "discard", "fila_x", missing).exit_code == 2
    assert len(letters.json("dlq", "list", "fila_x")["mensagens"]) == 12


def test_queues_are_listed_and_shown(cli: Cli) -> None:
    cli.submitted("--destino", SLOW_QUEUE)
    head, *rows = cli.ok("queues", "list").splitlines()
    assert re.split(r" {2,}", head) == ["queue", "waiting", "in work", "consumers", "dead letters"]
    assert any(row.split()[0] == "video-queue" for row in rows)
    assert "consumers: 1" in cli.ok("queues", "show", "video-queue").splitlines()
    assert cli.json("queues", "show", SLOW_QUEUE)["consumidores"] == 0
    assert "did you mean 'video-queue'?" in cli("queues", "show", "vidio-queue").stderr


def test_a_pipeline_is_put_with_its_warnings_and_deleted(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("name: por-cima\nsteps: [{type: VIRAL_COPI}]\n")
    put = cli("pipelines", "put", "p.yaml")
    assert (put.exit_code, put.stdout) == (0, "pipeline por-cima is in use: 1 step\n")
    assert "did you mean 'VIRAL_COPY'?" in put.stderr
    assert cli.json("pipelines", "show", "por-cima")["origem"] == "api"
    assert cli.ok("pipelines", "delete", "por-cima") == "pipeline por-cima deleted\n"
    assert cli("pipelines", "delete", "por-cima").exit_code == 2
    (tmp_path / "p.yaml").write_text("name: por-cima\nsteps: [{typ: VIRAL_COPY}]\n")
    assert "steps[0]" in cli("pipelines", "put", "p.yaml").stderr
    assert "cannot be read" in cli("pipelines", "put", "missing.yaml").stderr
