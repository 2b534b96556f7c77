"""What needs no server: parsing, faults, exit statuses, and how quickly it starts."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from oraculo import __version__
from oraculo.cli.app import app
from tests.cli.processes import environment, run

NOWHERE = "http://127.0.0.1:9"


def invoke(*args: str, **options: Any) -> Any:
    return CliRunner().invoke(app, list(args), **options)


def complaint(result: Any) -> str:
    """The one line that an expected error is."""
    assert result.exit_code == 2, (result.exit_code, result.output)
    lines = result.stderr.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("oraculo: ")
    return str(lines[0])


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_the_encoding_of_the_output_lacks_is_shown_by_its_code(tmp_path: Path, encoding: str) -> None:
    ended = run("doctor", "--url", NOWHERE, cwd=tmp_path, env={"PYTHONIOENCODING": encoding})
    assert ended.stderr == ""
    assert "whsec_\\u2026" in ended.stdout


def test_version_as_text_and_as_json() -> None:
    assert invoke("version").stdout == f"oraculo {__version__}\n"
    assert invoke("--version").stdout == f"oraculo {__version__}\n"
    assert json.loads(invoke("version", "--json").stdout)["versao"] == __version__


@pytest.mark.parametrize(
    "command",
    [
        "dev",
        "serve",
        "worker",
        "submit",
        "runs list",
        "runs watch",
        "queues list",
        "dlq redrive",
        "pipelines validate",
        "doctor",
        "asyncapi",
        "check-worker",
        "simulate",
    ],
)
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_every_command_has_help(command: str, option: str) -> None:
    result = invoke(*command.split(), option)
    assert result.exit_code == 0
    assert f"Usage: oraculo {command}" in result.stdout.replace("root", "oraculo")


@pytest.mark.parametrize("group", [[], ["runs"], ["dlq"], ["pipelines"]])
def test_a_group_without_a_command_shows_its_help_and_ends_with_2(group: list[str]) -> None:
    result = invoke(*group)
    assert result.exit_code == 2
    assert "Usage:" in result.output
    assert "oraculo: \n" not in result.stderr


def test_the_package_runs_as_a_module(tmp_path: Path) -> None:
    said = subprocess.run(
        [sys.executable, "-m", "oraculo", "version"], cwd=tmp_path, env=environment(), capture_output=True, check=True
    )
    assert said.stdout.decode() == f"oraculo {__version__}\n"


@pytest.mark.parametrize(("words", "found"), [("oraculo ru", "runs"), ("oraculo runs wa", "watch")])
def test_a_shell_completes_commands(tmp_path: Path, words: str, found: str) -> None:
    variables = {"_ORACULO_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    assert run(cwd=tmp_path, env=variables).stdout == f"{found}\n"
    script = run(cwd=tmp_path, env={"_ORACULO_COMPLETE": "source_bash"}).stdout
    assert "complete -o default -F _oraculo_completion oraculo" in script


def test_an_unknown_option_is_one_line_that_names_the_help() -> None:
    assert "--frobnicate" in complaint(invoke("submit", "--frobnicate"))
    assert "--help" in complaint(invoke("runs", "list", "--limit", "many"))


def test_an_unknown_command_is_one_line() -> None:
    assert "lits" in complaint(invoke("runs", "lits"))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "none of them"),
        (["--tipo", "a", "--pipeline", "b"], "--tipo and --pipeline"),
        (["--tipo", "a", "--payload", "{oops"], "--payload: must be a JSON object"),
        (["--tipo", "a", "--payload", "[1]"], "must be a JSON object"),
        (["--tipo", "a", "--payload", "@missing.json"], "missing.json: cannot be read"),
        (["--destino", '{"fila": '], '--destino: must be a JSON object, as {"fila": "escavador_youtube"}: '),
        (["--tipo", "a", "--prioridade", "10"], "prioridade"),
        (["--tipo", "a", "--timeout", "inf"], "'--timeout': "),
        (["--tipo", "a", "--wait", "inf"], "'--wait': "),
        (["--tipo", "a", "--wait", "1e12"], "31536000"),
        (["--tipo", "a", "--idempotency-key", "é"], "--idempotency-key: must be plain ASCII in one line"),
        (["--tipo", "a", "--api-key", "é"], "--api-key: must be plain ASCII in one line"),
        (["--tipo", "a", "--api-key", "a\n"], "--api-key: must be plain ASCII in one line"),
    ],
)
def test_a_bad_submission_is_refused_before_any_server_is_asked(args: list[str], words: str) -> None:
    assert words in complaint(invoke("submit", *args, "--url", NOWHERE))


def test_a_payload_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.json").write_bytes(b'{"produto": "caf\xe9"}')
    said = complaint(invoke("submit", "--tipo", "a", "--payload", "@latin.json", "--url", NOWHERE))
    assert "must be a JSON object" in said


def test_payload_on_stdin_must_be_an_object_too() -> None:
    assert "stdin" in complaint(invoke("submit", "--tipo", "a", "--payload", "-", "--url", NOWHERE, input="7"))


@pytest.mark.parametrize(
    "args",
    [
        ["runs", "list"],
        ["runs", "watch", "x"],
        ["dlq", "list"],
        ["pipelines", "list"],
        ["submit", "--tipo", "coleta_completa"],
    ],
)
def test_a_server_that_is_not_there_is_one_line_with_its_url_and_the_way_out(args: list[str]) -> None:
    said = complaint(invoke(*args, "--url", NOWHERE))
    assert NOWHERE in said
    assert "oraculo dev" in said


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000",
        "http://",
        "http://[::1",
        "http://[zz]:80",
        "http://é☕:80",
        "http://localhost:80000",
    ],
)
def test_a_url_that_is_none_is_refused(url: str) -> None:
    said = complaint(invoke("runs", "list", "--url", url))
    assert "--url: " in said
    assert "is not the URL of a server; as http://127.0.0.1:8000" in said


@pytest.mark.parametrize("url", ["http://[::1]:9", "http://localhost:9", "http://127.0.0.1:9/oraculo/"])
def test_a_url_that_is_one_is_asked(url: str) -> None:
    assert "no server answers at" in complaint(invoke("runs", "list", "--url", url))


class Flickering(BaseHTTPRequestHandler):
    """Goes away in the middle of the first request, is not well at the second, takes the third, and gives the run's
    end to who asks for it once more."""

    asked: list[tuple[str | None, str | None]]  # the key and the preference of each
    taken: ClassVar = {"correlation_id": "r", "status": "em_execucao"}
    ended: ClassVar = {"correlation_id": "r", "status": "concluida", "resumo": {}}

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.asked.append((self.headers["Idempotency-Key"], self.headers["Prefer"]))
        if len(self.asked) == 1:
            self.close_connection = True
            return
        status = (503, 202, 200)[len(self.asked) - 2]
        body = json.dumps({503: {"detail": "the store is away"}, 202: self.taken, 200: self.ended}[status]).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def flickering() -> Iterator[str]:
    Flickering.asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Flickering) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_submission_that_is_cut_off_is_made_again_under_the_same_key_by_who_waits(flickering: str) -> None:
    result = invoke("submit", "--destino", "x", "--wait", "20", "--url", flickering, "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (0, Flickering.ended), result.stderr
    keys, waits = zip(*Flickering.asked, strict=True)
    assert len(set(keys)) == 1
    assert waits[:3] == (None, None, None)
    assert waits[3].startswith("wait=")


def test_a_submission_that_is_cut_off_is_one_line_for_who_does_not_wait(flickering: str) -> None:
    assert "no server answers at" in complaint(invoke("submit", "--destino", "x", "--url", flickering))
    assert len(Flickering.asked) == 1


# -- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["dev"], ["serve"], ["worker", "a:b"]])
def test_bad_settings_are_one_line(command: list[str]) -> None:
    said = complaint(invoke(*command, env={"ORACULO_API_PORT": "many"}))
    assert "ORACULO_API_PORT" in said


@pytest.mark.parametrize(
    ("url", "module", "extra", "command"),
    [
        ("amqp://localhost", "pika", "rabbitmq", ["serve", "--port", "0"]),
        ("rediss://localhost", "hiredis", "redis", ["serve", "--port", "0"]),
        ("nats://localhost", "nats", "nats", ["serve", "--port", "0"]),
        ("amqp://localhost", "pika", "rabbitmq", ["worker", "a:b"]),
        ("rediss://localhost", "hiredis", "redis", ["worker", "a:b"]),
        ("nats://localhost", "nats", "nats", ["worker", "a:b"]),
    ],
)
def test_a_broker_whose_client_is_missing_is_named_with_its_extra(
    tmp_path: Path, command: list[str], url: str, module: str, extra: str
) -> None:
    """In a process of its own, where nothing has loaded the client before."""
    (tmp_path / "a.py").write_text(
        "from oraculo.worker import App\n\nb = App('b')\nb.queue('c')(lambda payload: payload)\n"
    )
    program = f"import sys\nsys.modules[{module!r}] = None\nfrom oraculo.cli.app import app\napp({command!r})\n"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment(ORACULO_BROKER_URL=url),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    (said,) = done.stderr.splitlines()
    assert said.startswith(f"oraculo: ORACULO_BROKER_URL: {url.partition(':')[0]}:// needs a client")
    assert f"({module}" in said
    assert said.endswith(f"pip install 'oraculo-core[{extra}]'")


def test_the_memory_broker_takes_over_from_no_other() -> None:
    said = complaint(invoke("serve", "--port", "0", env={"ORACULO_BROKER_URL": "memory://,redis://localhost"}))
    assert "memory:// in a list" in said


@pytest.mark.parametrize(
    ("url", "module", "extra"),
    [
        ("postgresql://localhost/x", "asyncpg", "postgres"),
        ("redis://localhost/0", "hiredis", "redis"),
        ("mongodb://localhost/x", "pymongo", "mongo"),
    ],
)
def test_a_store_whose_client_is_missing_is_named_with_its_extra(
    url: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == module or name.startswith("oraculo.stores.")]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.startswith("oraculo.clients")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    said = complaint(invoke("serve", "--port", "0", env={"ORACULO_STORE_URL": url}))
    assert f"({module})" in said
    assert f"pip install 'oraculo-core[{extra}]'" in said


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("s3://b/o", "(No module named 'fsspec'): pip install 'oraculo-core[s3]'"),
        ("gs://b/o", "(No module named 'fsspec'): pip install fsspec"),
    ],
)
def test_a_package_that_a_place_for_large_results_needs_is_named(
    url: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "fsspec"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_WithoutFsspec(), *sys.meta_path])
    said = complaint(invoke("serve", "--port", "0", env={"ORACULO_OBJECTS_URL": url}))
    assert said.endswith(advice)


class _WithoutFsspec:
    """Finds modules as a Python without fsspec does."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] == "fsspec":
            raise ModuleNotFoundError("No module named 'fsspec'", name="fsspec")


def test_a_store_that_cannot_be_reached_is_one_line_once_patience_ends() -> None:
    env = {"ORACULO_STORE_URL": "postgresql://127.0.0.1:9/x", "ORACULO_STORE_PATIENCE": "0"}
    said = complaint(invoke("serve", "--port", "0", env=env))
    assert "127.0.0.1:9" in said


def test_a_store_that_cannot_be_opened_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    said = complaint(invoke("serve", "--port", "0", env={"ORACULO_STORE_URL": "sqlite:///file/x.db"}))
    assert "file" in said


def test_dev_refuses_a_store_url_that_is_none() -> None:
    assert "--store" in complaint(invoke("dev", "--store", "dev.db"))


def test_uvicorn_with_bad_settings_ends_with_2_and_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "uvicorn", "oraculo.main:app", "--port", "0"],
        cwd=tmp_path,
        env=environment(ORACULO_STORE_URL="sqlite:///x.db", ORACULO_BROKER_URL="memory://,memory://"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "oraculo: ORACULO_BROKER_URL: has memory:// in a list of brokers" in done.stderr
    assert "Traceback" not in done.stderr


# -- workers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "way_out"),
    [
        (["api"], "; use `oraculo serve`, or set it to a broker that is shared"),
        (["engine"], "; use `oraculo serve`, or set it to a broker that is shared"),
        (["check-worker", "--queue", "x"], "; set it to a broker that is shared"),
    ],
)
def test_a_process_of_several_cannot_share_memory(command: list[str], way_out: str) -> None:
    assert f"memory:// lives inside one process and no other can reach it{way_out}" in complaint(invoke(*command))


def test_an_engine_that_listens_nowhere_has_no_host() -> None:
    assert "--host: is of no use without --port" in complaint(invoke("engine", "--host", "0.0.0.0"))


@pytest.mark.parametrize("command", [["serve"], ["api"], ["dev"], ["dev", "--no-samples"], ["engine"]], ids=" ".join)
@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_nothing_is_served_to_other_machines_without_keys(command: list[str], host: str) -> None:
    env = {"ORACULO_BROKER_URL": "redis://127.0.0.1:1"}
    said = invoke(*command, "--host", host, "--port", "0", env=env)
    assert said.exit_code == 2
    assert f"oraculo: ORACULO_API_KEYS: none are set, and other machines can reach {host}; " in said.stderr
    assert "--insecure" in said.stderr


def test_a_worker_process_cannot_share_memory() -> None:
    said = complaint(invoke("worker", "meus:app"))
    assert "oraculo dev --app meus:app" in said


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("sem_dois_pontos", "MODULE:APP"),
        ("nao_existe:app", "there is no module 'nao_existe'"),
        ("com_app.py:app", "there is no module 'com_app.py' in "),
        (
            "com_app.py:app",
            " or installed; give the module as Python imports it, as meus_workers:app, and not its file",
        ),
        ("./com_app.py:app", "must be MODULE:APP; give the module as Python imports it"),
        ("com_app:outro", "no App 'outro'; it has app"),
        ("com_app:vazio", "no handlers"),
        ("quebrado:app", "RuntimeError: boom"),
        ("importa_o_que_nao_ha:app", "No module named 'nao_ha'"),
        ("sem_app:app", "no App 'app'; it has none"),
        ("errado:app", " (errado.py, line 2)"),
    ],
)
def test_an_app_that_cannot_be_loaded_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, words: str
) -> None:
    (tmp_path / "com_app.py").write_text(_APP)
    (tmp_path / "quebrado.py").write_text("raise RuntimeError('boom')\n")
    (tmp_path / "importa_o_que_nao_ha.py").write_text("import nao_ha\n")
    (tmp_path / "sem_app.py").write_text("app = 1\n")
    (tmp_path / "errado.py").write_text("\ndef f(:\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert words in complaint(invoke("dev", "--app", target))
    for command in (["serve", "--app"], ["worker"], ["worker", "--engine", "celery"]):
        assert words in complaint(invoke(*command, target, env={"ORACULO_BROKER_URL": "amqp://somewhere"}))
    sys.modules.pop("com_app", None)


_APP = """
from oraculo.worker import App

app = App("meu")
vazio = App("vazio")


@app.executador("meu")
async def work(payload: dict) -> str:
    return "feito"
"""


# -- pipelines validate ----------------------------------------------------------------------------------------------

GOOD = "name: bom\nsteps:\n  - type: VIRAL_COPY\n"
BAD = "name: ruim\nsteps:\n  - type: VIRAL_COPY\n    dependsOn: [NADA]\n"


def test_good_pipelines_validate(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(GOOD)
    (tmp_path / "b.json").write_text('{"name": "outro", "steps": [{"type": "CAPTIONS"}]}')
    result = invoke("pipelines", "validate", "a.yaml", "b.json")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "a.yaml: ok, pipeline bom",
        "  VIRAL_COPY → text-queue",
        "b.json: ok, pipeline outro",
        "  CAPTIONS → captions-queue",
    ]


def test_a_type_that_looks_mistyped_is_warned_of(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(GOOD.replace("VIRAL_COPY", "VIRAL_COPPY"))
    result = invoke("pipelines", "validate", "a.yaml")
    assert result.exit_code == 0
    assert "  VIRAL_COPPY → VIRAL_COPPY\n" in result.stdout
    assert "did you mean 'VIRAL_COPY'?" in result.stderr
    document = json.loads(invoke("pipelines", "validate", "a.yaml", "--json").stdout)
    [found] = document["arquivos"]
    assert found["filas"] == {"VIRAL_COPPY": "VIRAL_COPPY"}
    assert found["avisos"][0]["campo"] == "steps[0] (VIRAL_COPPY).type"


def test_files_are_validated_though_no_server_says_what_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.yaml").write_text(GOOD)
    monkeypatch.setenv("ORACULO_URL", "http://127.0.0.1:1")
    result = invoke("pipelines", "validate", "a.yaml")
    assert (result.exit_code, result.stdout.splitlines()[0]) == (0, "a.yaml: ok, pipeline bom")
    assert "nobody says which queues are served: no server answers" in result.stderr


@pytest.mark.parametrize("option", ["--status", "--pipeline", "--query", "--since", "--until"])
def test_an_empty_filter_does_not_mean_every_run(option: str) -> None:
    for command in ("list", "cancel", "retry"):
        assert complaint(invoke("runs", command, option, "", *([] if command == "list" else ["--yes"]))) == (
            f"oraculo: {option}: is empty; give it a value, or leave it out"
        )


def test_a_bad_pipeline_names_file_step_and_fault_and_the_good_ones_are_reported_too(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(GOOD)
    (tmp_path / "b.yaml").write_text(BAD)
    result = invoke("pipelines", "validate", "a.yaml", "b.yaml")
    assert result.exit_code == 2
    assert result.stdout.startswith("a.yaml: ok, pipeline bom\n")
    assert "b.yaml" not in result.stdout
    assert "b.yaml: steps[0] (VIRAL_COPY).dependsOn: no step has the id 'NADA'" in result.stderr


def test_a_folder_is_validated_whole_and_a_name_may_be_there_once(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.yaml").write_text(GOOD)
    (tmp_path / "folder" / "b.yml").write_text(GOOD)
    (tmp_path / "folder" / ".#a.yaml").symlink_to("an editor's lock")
    result = invoke("pipelines", "validate", "folder", "--json")
    assert result.exit_code == 2
    first, second = json.loads(result.stdout)["arquivos"]
    assert first["valido"]
    assert second["erros"][0]["campo"] == "name"


def test_a_file_that_is_not_there_or_not_yaml_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("steps: [\n")
    assert "cannot be read" in complaint(invoke("pipelines", "validate", "missing.yaml"))
    assert "line" in complaint(invoke("pipelines", "validate", "bad.yaml"))


# -- starting quickly ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "heavy"),
    [
        (["--help"], ["fastapi", "uvicorn", "httpx2", "sqlite3", "oraculo.engine", "oraculo.bootstrap"]),
        (["runs", "list", "--url", NOWHERE], ["fastapi", "uvicorn", "sqlite3", "oraculo.engine", "oraculo.bootstrap"]),
        (["worker", "a:b"], ["fastapi", "httpx2", "prometheus_client", "oraculo.engine"]),
    ],
)
def test_a_command_loads_only_what_it_needs(tmp_path: Path, args: list[str], heavy: list[str]) -> None:
    program = (
        "import sys\n"
        "from oraculo.cli.app import app\n"
        f"try:\n    app({args!r})\nexcept SystemExit:\n    pass\n"
        f"print([name for name in {heavy!r} if name in sys.modules], file=sys.stderr)\n"
    )
    plain = environment(COVERAGE_PROCESS_CONFIG="")  # measuring loads modules of its own
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=plain, capture_output=True, text=True, check=True
    )
    assert done.stderr.splitlines()[-1] == "[]"


def test_an_output_that_nobody_reads_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(GOOD)
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as nobody:
        done = run("pipelines", "validate", "a.yaml", cwd=tmp_path, env={"PYTHONUNBUFFERED": ""}, stdout=nobody)
    assert (done.returncode, done.stderr) == (1, "")


def test_the_console_script_ends_with_the_status(tmp_path: Path) -> None:
    done = run("runs", "list", "--url", NOWHERE, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
