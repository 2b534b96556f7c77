"""MongoDB: a `mongod` on the PATH, or the one that scripts/get-mongod fetches (on x86_64 it runs under qemu)."""

import shutil
import subprocess
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from pymongo import MongoClient, WriteConcern
from pymongo.errors import OperationFailure

from tests.servers.process import PATIENCE, Server, ServerMissing

_SCRIPT = Path(__file__).parents[2] / "scripts" / "get-mongod"
_PATIENCE = 300.0  # for packages of some 80 MB
_SET = "oraculo"
_WRITES = 10
_NATIVE_WRITE = 0.002  # seconds until a native server has journaled a write
_SLOWEST = 10.0


class Mongo(Server):
    """The only member of a replica set, which transactions need; or a lone server. With a `user`, all must log in."""

    name = "mongodb"

    def __init__(self, *, alone: bool = False, user: str = "", password: str = "") -> None:
        self._binary = binary()
        super().__init__()
        self.alone = alone
        self.user = user
        self.password = password

    @property
    def url(self) -> str:
        login = f"{self.user}:{self.password}@" if self.user else ""
        options = [] if self.alone else [f"replicaSet={_SET}"]
        options += ["authSource=admin"] if self.user else []
        return f"mongodb://{login}127.0.0.1:{self.port}/{'?' if options else ''}{'&'.join(options)}"

    def command(self) -> list[str]:
        data = self.folder / "data"
        data.mkdir(exist_ok=True)
        place = ["--port", str(self.port), "--bind_ip", "127.0.0.1", "--nounixsocket", "--dbpath", str(data)]
        small = ["--wiredTigerCacheSizeGB", "0.25", "--setParameter", "diagnosticDataCollectionEnabled=false"]
        member = [] if self.alone else ["--replSet", _SET, "--oplogSize", "64"]
        return [self._binary, "--quiet", *place, *small, *member, *self._locked()]

    def _locked(self) -> list[str]:
        """Members of a set know each other by a key, which turns on logins, too."""
        if not self.user or self.alone:
            return ["--auth"] if self.user else []
        key = self.folder / "key"
        if not key.exists():
            key.write_text("oraculotests")
            key.chmod(0o400)
        return ["--keyFile", str(key)]

    def start(self) -> None:
        super().start()
        with MongoClient("127.0.0.1", self.port, directConnection=True) as client:
            if not self.alone:
                self._become_primary(client)
            if self.user:
                with suppress(OperationFailure):  # at its first start it lets this machine make one user
                    client.admin.command("createUser", self.user, pwd=self.password, roles=["root"])

    def _become_primary(self, client: MongoClient[Any]) -> None:
        member = {"_id": 0, "host": f"127.0.0.1:{self.port}"}
        with suppress(OperationFailure):  # it was started before
            client.admin.command("replSetInitiate", {"_id": _SET, "members": [member]})
        deadline = time.monotonic() + PATIENCE
        while not client.admin.command("hello")["isWritablePrimary"]:
            if time.monotonic() > deadline:
                raise ServerMissing("mongodb did not become the primary of its set")
            time.sleep(0.02)


def slowness(url: str) -> float:
    """Return how many times longer than a native server this one takes for a journaled write: 1 to 10.

    The tests multiply their time limits by it. Under qemu it is about 4, and more while other tests run.
    """
    with MongoClient(url) as client:
        collection = client.get_database("slowness").get_collection("writes", write_concern=WriteConcern(1, j=True))
        for _ in range(2):  # the first round makes the collection, and fills an emulator's cache
            began = time.monotonic()
            for _ in range(_WRITES):
                collection.insert_one({})
            took = time.monotonic() - began
        client.drop_database("slowness")
    return min(max(1.0, took / _WRITES / _NATIVE_WRITE), _SLOWEST)


@cache
def binary() -> str:
    if found := shutil.which("mongod"):
        return found
    try:
        done = subprocess.run([_SCRIPT], capture_output=True, text=True, timeout=_PATIENCE, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServerMissing(f"scripts/get-mongod failed: {error}") from error
    if done.returncode != 0:
        raise ServerMissing(done.stderr.strip()[-500:] or "scripts/get-mongod failed")
    return done.stdout.strip()
