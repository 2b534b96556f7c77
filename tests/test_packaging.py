"""What is published: the name, the files of the source distribution, and what the package exports."""

import importlib
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_the_source_distribution_has_what_make_test_needs(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=60)
    (made,) = tmp_path.iterdir()
    with tarfile.open(made) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = {"Makefile", "pyproject.toml", "requirements/run.txt", "requirements/dev.txt", "README.pt-BR.md"}
    assert needed <= names
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "scripts").glob("*") if path.is_file()} <= names
    source = {path.relative_to(ROOT).as_posix() for path in (ROOT / "src").rglob("*.py")}
    assert source <= names


def test_the_distribution_is_oraculo_core_and_the_command_oraculo() -> None:
    published = metadata.distribution("oraculo-core")
    assert published.version == importlib.import_module("oraculo").__version__
    assert [point.name for point in published.entry_points if point.group == "console_scripts"] == ["oraculo"]


EXPORTS = {
    "oraculo.worker": {"Answer", "App", "Client", "Context", "DoNotRetry", "Worker"},
    "oraculo.brokers.rabbitmq": {"RabbitMQBroker"},
    "oraculo.brokers.redis_streams": {"RedisStreamsBroker"},
    "oraculo.brokers.nats": {"NatsBroker"},
    "oraculo.brokers.failover": {"FailoverBroker"},
    "oraculo.stores.postgres": {"PostgresStore"},
    "oraculo.stores.redis": {"RedisStore"},
    "oraculo.stores.mongo": {"MongoStore"},
}


@pytest.mark.parametrize("package", EXPORTS)
def test_a_package_exports_these_names_and_no_others(package: str) -> None:
    module = importlib.import_module(package)
    assert set(module.__all__) == EXPORTS[package]
    assert all(hasattr(module, name) for name in module.__all__)
