"""What `oraculo doctor` says of the place for large results."""

import asyncio
from pathlib import Path

from typer.testing import CliRunner

from oraculo.bootstrap import make_objects, make_store
from oraculo.cli.app import app
from oraculo.engine.results.clean_up import claim_fault
from oraculo.settings import ObjectSettings, Settings, StoreSettings
from tests.cli.test_doctor import doctor


def test_a_folder_is_looked_at_and_not_made(tmp_path: Path) -> None:
    _, checks = doctor()
    assert checks["objects"]["estado"] == "ok"
    assert checks["objects"]["detalhe"].endswith(".oraculo/oraculo.db.objects")
    assert not list(tmp_path.iterdir())


def test_turned_off_is_reported() -> None:
    _, checks = doctor(ORACULO_OBJECTS_THRESHOLD_BYTES="0")
    assert "stay in the store" in checks["objects"]["detalhe"]


def test_a_server_as_the_store_needs_a_url() -> None:
    _, checks = doctor(ORACULO_STORE_URL="postgresql://nobody@127.0.0.1:9/x")
    assert checks["objects"]["estado"] == "ok"
    assert "ORACULO_OBJECTS_URL" in checks["objects"]["o_que_fazer"]


def test_a_place_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, checks = doctor(ORACULO_OBJECTS_URL="./file")
    assert code == 1
    assert checks["objects"]["estado"] == "erro"
    assert "ORACULO_OBJECTS_URL" in checks["objects"]["o_que_fazer"]


def test_a_password_in_the_url_is_not_shown() -> None:
    env = {"ORACULO_OBJECTS_URL": "memory://ana:s3cret@b/x?token=t0ken"}
    for args in (["doctor"], ["doctor", "--json"]):
        said = CliRunner().invoke(app, args, env=env).stdout
        assert "memory://ana:***@b/x" in said
        assert "s3cret" not in said
        assert "t0ken" not in said


def claim_place(store_url: str) -> None:
    """As an engine does at its start."""

    async def begin() -> None:
        settings = Settings(store=StoreSettings(url=store_url), objects=ObjectSettings(url="./place"))
        store, objects = make_store(settings), make_objects(settings)
        assert objects is not None
        await store.start()
        try:
            assert await claim_fault(objects, store) is None
        finally:
            await store.close()
            await objects.close()

    asyncio.run(begin())


def test_a_place_of_another_installation_is_an_error(tmp_path: Path) -> None:
    claim_place("sqlite:///other.db")
    (tmp_path / "x.db").touch()
    code, checks = doctor(ORACULO_STORE_URL="sqlite:///x.db", ORACULO_OBJECTS_URL="./place")
    assert code == 1
    assert "another installation" in checks["objects"]["detalhe"]


def test_a_folder_that_is_not_mounted_is_an_error(tmp_path: Path) -> None:
    claim_place("sqlite:///x.db")
    (tmp_path / "place" / "installation").unlink()
    code, checks = doctor(ORACULO_STORE_URL="sqlite:///x.db", ORACULO_OBJECTS_URL="./place")
    assert code == 1
    assert "is it mounted" in checks["objects"]["detalhe"]


def test_a_place_that_nobody_has_stays_nobodys(tmp_path: Path) -> None:
    (tmp_path / "x.db").touch()
    (tmp_path / "place").mkdir()
    _, checks = doctor(ORACULO_STORE_URL="sqlite:///x.db", ORACULO_OBJECTS_URL="./place")
    assert checks["objects"]["estado"] == "ok"
    assert not list((tmp_path / "place").iterdir())
