"""`oraculo simulate`: a user's own pipeline, rehearsed under faults."""

import errno
import io
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from oraculo.cli.app import app
from oraculo.cli.simulate import _counted

EXAMPLE = Path(__file__).parents[2] / "examples" / "meu-pipeline.yaml"


def simulate(*args: str) -> Any:
    return CliRunner().invoke(app, ["simulate", *args])


def test_it_says_that_the_pipeline_always_ends_how_when_and_what_is_tight() -> None:
    result = simulate(str(EXAMPLE), "--seeds", "10", "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert sum(said["statuses"].values()) == 10
    assert said["always_ends"] is True


def test_one_seed_gives_the_same_report_each_time() -> None:
    first, second = (simulate(str(EXAMPLE), "--seed", "7", "--fault", "drop=0.2").stdout for _ in range(2))
    assert first == second
    assert first


def test_a_pipeline_is_rehearsed_by_the_rules_of_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "oraculo.toml").write_text("[runs]\ntimeout = 7\nmax_attempts = 1\nbackoff = 0\n")
    (tmp_path / "p.yaml").write_text("name: p\nsteps: [{type: A, queue: executador_a}]\n")
    monkeypatch.setenv("ORACULO_RUNS_MAX_ATTEMPTS", "30")
    often = simulate("p.yaml", "--seeds", "20", "--fault", "drop=0", "--failure", "A=0.5", "--latency", "A=0.01")
    assert "end statuses: 20 concluida" in often.stdout, often.output
    args = ["p.yaml", "--seed", "2", "--fault", "drop=0", "--latency", "A=500"]
    slow = json.loads(simulate(*args, "--json").stdout)
    assert slow["tight_deadlines"] == [{"of": "the run", "seconds": 7.0, "p95": None, "met": 1}]
    assert slow["judged"] == 1
    assert "too tight: the deadline of the run, 7 s (none ended well, 1 of 1 ran into it)\n" in simulate(*args).stdout


def test_steps_on_celery_and_bullmq_have_stand_ins_too(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(
        "name: p\nsteps: [{queue: celery://loja.resumir}, {id: B, queue: bullmq://q, dependsOn: celery://loja.resumir}]\n"
    )
    result = simulate(
        str(tmp_path / "p.yaml"), "--seeds", "3", "--latency", "celery://loja.resumir=2", "--fault", "drop=0"
    )
    assert result.exit_code == 0, result.output
    assert "longest path: celery://loja.resumir → B, 3.0 s" in result.stdout


def test_a_deadline_that_runs_met_since_a_message_was_lost_is_not_called_tight(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("name: p\ntimeout: 30\nsteps: [{type: A}]\n")
    args = [str(tmp_path / "p.yaml"), "--seeds", "8", "--fault", "drop=0.2", "--failure", "A=0"]
    said = json.loads(simulate(*args, "--json").stdout)
    assert said["tight_deadlines"] == []
    assert 0 < said["judged"] < 8
    in_words = simulate(*args).stdout
    assert "no deadline is too tight" in in_words
    assert f"deadlines are judged by the {said['judged']} schedules that lost no message" in in_words


def test_a_file_that_may_not_be_read_is_one_line_and_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, mode: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)  # root may read everything
    result = simulate(str(EXAMPLE))
    assert result.exit_code == 2, result.exception
    assert result.stderr == f"oraculo: {EXAMPLE}: cannot be read: Permission denied\n"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["no-such.yaml"], "there is no such file"),
        ([str(EXAMPLE.parent)], "cannot be read: Is a directory"),
        ([str(EXAMPLE), "--fault", "dorp=0.1"], "drop"),
        ([str(EXAMPLE), "--fault", "drop=many"], "drop"),
        ([str(EXAMPLE), "--fault", "drop=2"], "drop"),
        ([str(EXAMPLE), "--latency", "NOBODY=1"], "has no step 'NOBODY'"),
        ([str(EXAMPLE), "--latency", "VIRAL_COPY=0"], "more than 0 seconds"),
        ([str(EXAMPLE), "--latency", "VIRAL_COPY=nan"], "VIRAL_COPY needs more than 0 seconds, as 12; got 'nan'"),
        ([str(EXAMPLE), "--latency", "VIRAL_COPY=inf"], "VIRAL_COPY needs more than 0 seconds, as 12; got 'inf'"),
        ([str(EXAMPLE), "--failure", "VIRAL_COPY=1.5"], "a share from 0 to 1"),
        ([str(EXAMPLE), "--seeds", "0"], "--seeds"),
    ],
)
def test_bad_usage_is_one_line_and_2(args: list[str], said: str) -> None:
    result = simulate(*args)
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert said in result.stderr


def test_people_are_reported_in_a_few_lines() -> None:
    said = simulate(str(EXAMPLE), "--seeds", "5", "--latency", "VIRAL_COPY=500").stdout
    assert "always ends: yes" in said
    assert "longest path: VIRAL_COPY → PROMOTIONAL_VIDEO" in said
    assert "too tight: the deadline of step VIRAL_COPY" in said


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_learns_how_far_it_is_and_the_line_is_gone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    assert list(_counted(range(3))) == [0, 1, 2]
    assert terminal.getvalue() == "\rseed 1 of 3\rseed 2 of 3\rseed 3 of 3\r\x1b[K"


def test_who_is_no_terminal_is_not_reported_how_far_it_is() -> None:
    assert simulate(str(EXAMPLE), "--seeds", "2").stderr == ""
