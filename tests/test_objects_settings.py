"""Which object store the settings mean."""

import builtins
from pathlib import Path
from typing import Any

import pytest

from oraculo.bootstrap import build, make_objects, make_worker
from oraculo.errors import InvalidSettings, ObjectsUnavailable
from oraculo.ports.clock import SystemClock
from oraculo.settings import load_settings
from oraculo.stores.objects import FolderObjects, RemoteObjects
from oraculo.worker import App

POSTGRES = "postgresql://nobody@localhost/oraculo"


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


async def place_of(**environ: str) -> str | None:
    objects = make_objects(load_settings({f"ORACULO_{name}": value for name, value in environ.items()}))
    return None if objects is None else f"{type(objects).__name__} {await objects.check()}"


async def test_beside_the_sqlite_file_unless_told_otherwise(tmp_path: Path) -> None:
    assert await place_of() == f"FolderObjects {tmp_path}/.oraculo/oraculo.db.objects"
    assert await place_of(STORE_URL="sqlite:////tmp/x/o.db") == "FolderObjects /tmp/x/o.db.objects"
    assert await place_of(STORE_URL="sqlite:///:memory:") is None


async def test_with_a_server_as_the_store_nowhere_until_it_is_told() -> None:
    assert await place_of(STORE_URL=POSTGRES) is None
    assert await place_of(STORE_URL=POSTGRES, OBJECTS_URL="memory://b") == "RemoteObjects memory://b"


async def test_a_folder_by_its_path_or_url(tmp_path: Path) -> None:
    assert await place_of(OBJECTS_URL="./large") == f"FolderObjects {tmp_path}/large"
    assert await place_of(OBJECTS_URL="file:///tmp/large%20ones") == "FolderObjects /tmp/large ones"


def test_the_numbers_are_those_of_the_documentation() -> None:
    objects = load_settings({}).objects
    assert (objects.url, objects.threshold_bytes, objects.inline_bytes) == ("", 262144, 33554432)
    set_ones = load_settings({"ORACULO_OBJECTS_THRESHOLD_BYTES": "0", "ORACULO_OBJECTS_INLINE_BYTES": "1"}).objects
    assert (set_ones.threshold_bytes, set_ones.inline_bytes) == (0, 1)


@pytest.mark.parametrize("url", ["file:objects", "file://objects", "s3://", "s3:///", "://x"])
def test_a_url_that_names_no_place_is_told(url: str) -> None:
    with pytest.raises(InvalidSettings) as caught:
        load_settings({"ORACULO_OBJECTS_URL": url})
    assert caught.value.faults[0].field == "ORACULO_OBJECTS_URL"


@pytest.mark.parametrize(
    ("scheme", "words"), [("s3", "pip install 'oraculo-core[s3]'"), ("nonsense", "cannot be used")]
)
def test_what_cannot_be_reached_from_here_is_told(scheme: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_s3fs(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("s3fs"):
            raise ModuleNotFoundError("No module named 's3fs'", name="s3fs")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_s3fs)
    with pytest.raises(InvalidSettings) as caught:
        make_objects(load_settings({"ORACULO_OBJECTS_URL": f"{scheme}://bucket/prefix?key=secret"}))
    assert words in caught.value.faults[0].problem
    assert "secret" not in str(caught.value)


SECRETS = "memory://ana:s3cr%40t@b/x?token=t0ken&listings_expiry_time=5"


async def test_a_password_in_the_url_is_shown_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = make_objects(load_settings({"ORACULO_OBJECTS_URL": SECRETS}))
    assert isinstance(objects, RemoteObjects)
    assert await objects.check() == "memory://ana:***@b/x"
    with pytest.raises(ObjectsUnavailable) as not_there:
        await objects.get("ab/x/y")

    def fail(path: str) -> bytes:
        raise OSError(f"no login to {SECRETS} as s3cr@t with t0ken for {path}")

    monkeypatch.setattr(objects._fs, "cat_file", fail)
    with pytest.raises(ObjectsUnavailable) as failed:
        await objects.get("ab/x/y")
    assert "memory://ana:***@b/x: OSError: no login to memory://ana:***@b/x?token=***&" in str(failed.value)
    for told in (str(not_there.value), str(failed.value)):
        assert "s3cr" not in told
        assert "t0ken" not in told


@pytest.mark.parametrize("error", ["bad URL '{}'", "bad password s3cr@t", "bad token t0ken"])
def test_a_place_that_cannot_be_used_is_told_without_its_password(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(url: str, **options: Any) -> Any:
        raise ValueError(error.format(SECRETS))

    monkeypatch.setattr("fsspec.core.url_to_fs", refuse)
    with pytest.raises(InvalidSettings, match="cannot be used: bad") as refused:
        make_objects(load_settings({"ORACULO_OBJECTS_URL": SECRETS}))
    assert "s3cr" not in str(refused.value)
    assert "t0ken" not in str(refused.value)


async def test_workers_are_given_the_object_store_only_when_its_url_is_set(tmp_path: Path) -> None:
    kept, named = load_settings({}), load_settings({"ORACULO_OBJECTS_URL": "./large"})
    for settings, is_given in ((kept, False), (named, True)):
        system = build(settings)
        assert isinstance(system.engine.ports.objects, FolderObjects)
        worker = make_worker(App("a"), system.broker, settings, SystemClock(), system.objects)
        assert (worker._objects is not None) is is_given


def test_options_of_the_file_system_are_in_the_query() -> None:
    objects = make_objects(load_settings({"ORACULO_OBJECTS_URL": "memory://bucket?listings_expiry_time=5"}))
    assert isinstance(objects, RemoteObjects)
    assert objects._fs.storage_options["listings_expiry_time"] == "5"
