"""What `oraculo doctor` says of the place for large results."""

from pathlib import Path

from tests.cli.test_doctor import doctor


def test_a_folder_is_looked_at_and_not_made(tmp_path: Path) -> None:
    _, checks = doctor()
    assert checks["objects"]["estado"] == "ok"
    assert checks["objects"]["detalhe"].endswith(".oraculo/oraculo.db.objects")
    assert not list(tmp_path.iterdir())


def test_turned_off_is_told() -> None:
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
