"""References: payloads that stand for results too large for a run, which rest in the object store.

    {"oraculo_referencia": {"chave": "<key>", "bytes": 300000, "sha256": "<hex>"}}

A reference is valid only when its key lies in the folder of its own run. So no worker can reach a result of another
run, or a file outside the object store.
"""

import re
from collections.abc import Iterable
from hashlib import blake2b, sha256
from urllib.parse import quote

import msgspec

from oraculo.core.run import Run

SHARDS = tuple(f"{number:02x}" for number in range(256))
CLAIM = "installation"  # the object beside the shards that names their installation
OWNER = "run"  # the object beside the results of a run that holds its id, for the cleaning up
UNNAMED = "resposta"  # in the key of an answer that does not name its task

_FIELD = "oraculo_referencia"
_BEGINNING = b'{"oraculo_referencia":'
_MAX_BYTES = 1024  # of a reference, with the spaces that its writer put into it
_MAX_NAME = 100  # of a task in a key; the name of a file may be longer
_KEY = re.compile(r"[0-9a-f]{2}/[0-9a-f]{32}/[A-Za-z0-9%._~-]{1,100}-[0-9a-f]{32}\.json")
_FOLDER = re.compile(r"[0-9a-f]{2}/[0-9a-f]{32}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class ResultReference(msgspec.Struct, frozen=True, rename={"key": "chave", "size": "bytes"}):
    """The key, size and hash of a result in the object store. Unknown fields of newer workers are ignored."""

    key: str
    size: int
    sha256: str

    def names(self, body: bytes) -> bool:
        """Return whether these are the bytes that were put."""
        return len(body) == self.size and sha256(body).hexdigest() == self.sha256


class _Envelope(msgspec.Struct, forbid_unknown_fields=True, rename={"reference": _FIELD}):
    reference: ResultReference


_decoder = msgspec.json.Decoder(_Envelope)
_encoder = msgspec.json.Encoder()


def run_folder(run_id: str) -> str:
    """Return the folder of a run's results: one of 256 shards, and a hash, which any id can have."""
    name = _hash(run_id.encode(errors="surrogatepass"))
    return f"{name[:2]}/{name}"


def is_run_folder(folder: str) -> bool:
    return _FOLDER.fullmatch(folder) is not None and folder[3:5] == folder[:2]


def make_reference(run_id: str, task: str | None, body: bytes) -> ResultReference:
    """Return the reference to a result. Its key holds the content's hash, so that two results never share one."""
    key = f"{run_folder(run_id)}/{_safe(task or UNNAMED)}-{_hash(body)}.json"
    return ResultReference(key, len(body), sha256(body).hexdigest())


def encode_reference(reference: ResultReference) -> bytes:
    return _encoder.encode(_Envelope(reference))


def may_be_reference(payload: bytes | None) -> bool:
    """Return whether a payload looks like a reference. It is cheap enough for every result."""
    return payload is not None and payload.startswith(_BEGINNING) and len(payload) <= _MAX_BYTES


def read_reference(run_id: str, payload: bytes | None) -> ResultReference | None:
    """Return the reference in a payload, or None when it is none or not one of this run."""
    if payload is None or not may_be_reference(payload):
        return None
    try:
        reference = _decoder.decode(payload).reference
    except (msgspec.DecodeError, RecursionError):
        return None
    is_sound = _KEY.fullmatch(reference.key) and _SHA256.fullmatch(reference.sha256) and reference.size >= 0
    return reference if is_sound and reference.key.startswith(run_folder(run_id) + "/") else None


def references_in(run: Run, numbers: Iterable[int] | None = None) -> dict[str, ResultReference]:
    """Return the references among the results of a run, or of these tasks, by task id."""
    found: dict[str, ResultReference] = {}
    for number in range(len(run.tasks)) if numbers is None else numbers:
        result = run.tasks[number].result
        if may_be_reference(result) and (reference := read_reference(run.id, result)) is not None:
            found[run.plan.steps[number].id] = reference
    return found


def _safe(task: str) -> str:
    quoted = quote(task, safe="", errors="surrogatepass")
    return quoted if len(quoted) <= _MAX_NAME else _hash(quoted.encode())


def _hash(content: bytes) -> str:
    return blake2b(content, digest_size=16).hexdigest()
