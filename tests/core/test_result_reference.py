"""References: made for a run, and taken for one only by that run."""

import json
from hashlib import blake2b, sha256

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oraculo.core.result_reference import (
    SHARDS,
    ResultReference,
    encode_reference,
    is_run_folder,
    make_reference,
    may_be_reference,
    read_reference,
    references_in,
    run_folder,
)
from tests.core.building import flow

BODY = b'{"dados":"' + b"x" * 300_000 + b'"}'


def fields(**changed: object) -> bytes:
    reference = msgspec.to_builtins(make_reference("run-1", "a", BODY)) | changed
    return msgspec.json.encode({"oraculo_referencia": reference})


def test_on_the_wire_it_is_one_field_with_three() -> None:
    reference = make_reference("run-1", "escavador_a", BODY)
    wire = msgspec.json.decode(encode_reference(reference))
    assert wire == {
        "oraculo_referencia": {"chave": reference.key, "bytes": len(BODY), "sha256": sha256(BODY).hexdigest()}
    }
    assert reference.key.startswith(f"{run_folder('run-1')}/escavador_a-")
    assert reference.key.endswith(".json")


@given(st.text(min_size=1, max_size=128), st.text(min_size=1, max_size=128) | st.none(), st.binary(max_size=50))
def test_whatever_the_ids_are_a_reference_is_read_by_its_run_and_by_no_other(
    run_id: str, task: str | None, body: bytes
) -> None:
    reference = make_reference(run_id, task, body)
    encoded = encode_reference(reference)
    assert read_reference(run_id, encoded) == reference
    assert read_reference(run_id + "x", encoded) is None
    assert max(map(len, reference.key.split("/"))) <= 200
    assert ".." not in reference.key.split("/")


@pytest.mark.parametrize(
    ("task", "name"),
    [
        ("escavador_a", "escavador_a"),
        ("a/b c", "a%2Fb%20c"),
        ("ção", "%C3%A7%C3%A3o"),
        ("A.b-c_d~9", "A.b-c_d~9"),
        ("x" * 100, "x" * 100),
        ("ç" * 17, blake2b(b"%C3%A7" * 17, digest_size=16).hexdigest()),
    ],
)
def test_a_key_is_made_as_docs_large_results_shows_it(task: str, name: str) -> None:
    """Workers without the SDK make such keys themselves."""
    run, content = (blake2b(text, digest_size=16).hexdigest() for text in ("execução-1".encode(), BODY))
    key = f"{run[:2]}/{run}/{name}-{content}.json"
    assert make_reference("execução-1", task, BODY).key == key
    by_hand = json.dumps(
        {"oraculo_referencia": {"chave": key, "bytes": len(BODY), "sha256": sha256(BODY).hexdigest()}}
    ).encode()
    assert read_reference("execução-1", by_hand) is not None
    assert read_reference("execução-1", by_hand.replace(name.encode(), b"a/b c")) is None


def test_the_same_content_has_the_same_key_and_another_another() -> None:
    assert make_reference("r", "t", b"{}").key == make_reference("r", "t", b"{}").key
    assert make_reference("r", "t", b"{}").key != make_reference("r", "t", b"{ }").key


def test_a_run_folder_lies_in_its_shard() -> None:
    folder = run_folder("run-1")
    assert is_run_folder(folder)
    assert folder.split("/")[0] in SHARDS
    other = "00" if folder[:2] != "00" else "01"
    assert not is_run_folder(other + folder[2:])
    assert not is_run_folder(folder + "/x")


@pytest.mark.parametrize(
    "payload",
    [
        None,
        b"{}",
        b'{"status":"ok","oraculo_referencia":{}}',
        b'{"oraculo_referencia":',
        b'{"oraculo_referencia":{}}',
        b'{"oraculo_referencia":"ab"}',
        fields() + b" " * 2000,
        fields(chave="../../etc/passwd"),
        fields(chave=run_folder("run-1") + "/../../../etc/passwd-" + "0" * 32 + ".json"),
        fields(chave=run_folder("run-2") + "/a-" + "0" * 32 + ".json"),
        fields(chave=run_folder("run-1") + "/run"),
        fields(chave=run_folder("run-1") + "/a\n-" + "0" * 32 + ".json"),
        fields(chave=run_folder("run-1") + "/a-" + "0" * 32 + ".json\n"),
        fields(sha256="x" * 64),
        fields(bytes=-1),
        b'{"oraculo_referencia":{},"mais":1}',
    ],
)
def test_what_is_no_sound_reference_of_the_run_is_none(payload: bytes | None) -> None:
    assert read_reference("run-1", payload) is None


def test_what_a_newer_worker_says_beside_is_left_alone() -> None:
    """Else its result would be handed out as the reference to it."""
    assert read_reference("run-1", fields(mais=1)) == make_reference("run-1", "a", BODY)


def test_spaces_after_a_colon_or_a_comma_do_not_matter() -> None:
    spaced = fields().replace(b":", b": ").replace(b",", b", ")
    assert read_reference("run-1", spaced) == make_reference("run-1", "a", BODY)


def test_the_quick_look_lets_through_all_that_is_one() -> None:
    assert may_be_reference(fields())
    assert not may_be_reference(None)
    assert not may_be_reference(BODY)


def test_it_names_only_the_bytes_that_were_put() -> None:
    reference = make_reference("run-1", "a", BODY)
    assert reference.names(BODY)
    assert not reference.names(BODY[:-1])
    assert not reference.names(BODY.replace(b"x", b"y"))
    assert not ResultReference(reference.key, reference.size + 1, reference.sha256).names(BODY)


def test_the_references_of_a_run_are_found_by_task() -> None:
    run = flow("a", "b", "c<a,b").run
    run.tasks[0].result = encode_reference(reference := make_reference(run.id, "a", BODY))
    run.tasks[1].result = encode_reference(make_reference("another", "b", BODY))
    assert references_in(run) == {"a": reference}
    assert references_in(run, run.plan.dependencies[2]) == {"a": reference}
    assert references_in(run, run.plan.dependencies[0]) == {}
