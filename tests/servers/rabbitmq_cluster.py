"""Three nodes of RabbitMQ as one cluster: each quorum queue has a member on each, and one of them leads it."""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import Self

from tests.servers.process import free_port
from tests.servers.rabbitmq import RabbitMQ

NODES = 3


class Node(RabbitMQ):
    """One of a cluster, whose nodes share a port mapper and a secret."""

    ticks = ""

    def __init__(self, mapper_port: int, nodes: "list[Node]") -> None:
        super().__init__()
        self._mapper_port = mapper_port
        self._nodes = nodes
        secret = self.folder / ".erlang.cookie"
        secret.write_text("oraculo-tests")
        secret.chmod(0o400)

    def command(self) -> list[str]:
        command = super().command()
        others = [
            f"cluster_formation.classic_config.nodes.{number} = oraculo-{node.port}@localhost\n"
            for number, node in enumerate(self._nodes, start=1)
        ]
        with (self.folder / "rabbitmq.conf").open("a") as config:
            config.write("cluster_formation.peer_discovery_backend = classic_config\n" + "".join(others))
        return command

    def _start_mapper(self) -> None:
        """The cluster has one for all."""


class RabbitMQCluster:
    def __init__(self) -> None:
        mapper_port = free_port()
        self.nodes: list[Node] = []
        for _ in range(NODES):
            self.nodes.append(Node(mapper_port, self.nodes))
        self._mapper: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        quiet = subprocess.DEVNULL
        environment = self.nodes[0].environment()
        self._mapper = subprocess.Popen(["epmd"], env=environment, stdin=quiet, stdout=quiet, stderr=quiet)
        try:
            with ThreadPoolExecutor(NODES) as together:  # each waits for the others
                list(together.map(Node.start, self.nodes))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.stop()
        if self._mapper is not None:
            self._mapper.kill()
            self._mapper.wait()
