"""RabbitMQ from Debian's package: installed when root and missing, else unpacked into the user's cache."""

import asyncio
import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

from tests.servers.certificates import make_certificates
from tests.servers.debian import install, one_at_a_time, run
from tests.servers.process import PATIENCE, ProcessElsewhere, Server, ServerMissing, answers, free_port

_INSTALLED = Path("/usr/lib/rabbitmq/bin")
# An idle node that spins takes from what is measured.
_NO_BUSY_WAITING = "+sbwt none +sbwtdcpu none +sbwtdio none"
_HELP = "install Debian's rabbitmq-server, or set ORACULO_TEST_RABBITMQ_URL, or ORACULO_TEST_SKIP=rabbitmq"


class RabbitMQ(Server):
    """A node of its own, with its own Erlang port mapper, so that it meets no other on the machine."""

    name = "rabbitmq"
    # Of each quorum queue, for its counters and, in a cluster, for its members: every 5 s otherwise, which for the
    # hundreds that tests leave behind is a good part of all that the node does.
    ticks = "-rabbit quorum_tick_interval 60000"
    # Those that the first node has loaded, as Erlang writes them. The next ones load them all at once instead of one by
    # one, as each is first called, and start with two thirds of the processor time.
    _modules: ClassVar[str] = ""

    def __init__(self) -> None:
        super().__init__()
        self.vhost = "/"
        self.tls_port = free_port()
        self.certificates = make_certificates(self.folder)
        self._scripts = scripts()
        self._mapper_port, self._distribution_port = free_port(), free_port()
        self._node = f"oraculo-{self.port}@localhost"
        self._pid_file = self.folder / "rabbitmq.pid"
        self._modules_file = self.folder / "modules"
        self._modules_file.write_text(RabbitMQ._modules)
        self._plugins = _itself_alone(self._scripts, self.folder / "plugins")
        self._mapper: subprocess.Popen[bytes] | ProcessElsewhere | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        RabbitMQ._modules = RabbitMQ._modules or self._modules_file.read_text()

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}/{quote(self.vhost, safe='')}"

    @property
    def tls_url(self) -> str:
        path = f"{quote(self.vhost, safe='')}?ssl_ca_certs={self.certificates.authority}"
        return f"amqps://guest:guest@localhost:{self.tls_port}/{path}"

    def enter_vhost(self, name: str) -> None:
        """Make a vhost, in which the users of `url` are from now on."""
        made = f'rabbit_vhost:add(<<"{name}">>, <<"tests">>)'
        rights = f'<<"guest">>, <<"{name}">>, <<".*">>, <<".*">>, <<".*">>, <<"tests">>'
        self.evaluate(f"{made}, rabbit_auth_backend_internal:set_permissions({rights}).")
        self.vhost = name

    def leave_vhost(self) -> None:
        """Delete the vhost and all its queues, without waiting for that."""
        self.evaluate(f'spawn(fun() -> rabbit_vhost:delete(<<"{self.vhost}">>, <<"tests">>) end).')
        self.vhost = "/"

    def command(self) -> list[str]:
        made, config = self.certificates, self.folder / "rabbitmq.conf"
        config.write_text(
            f"listeners.tcp.local = 127.0.0.1:{self.port}\n"
            f"listeners.ssl.local = 127.0.0.1:{self.tls_port}\n"
            f"ssl_options.cacertfile = {made.authority}\n"
            f"ssl_options.certfile = {made.certificate}\n"
            f"ssl_options.keyfile = {made.key}\n"
            "disk_free_limit.absolute = 50MB\n"
            "log.console = true\nlog.console.level = warning\nlog.file = false\n"
        )
        (self.folder / "enabled_plugins").write_text("[].")
        self._pid_file.unlink(missing_ok=True)
        return [str(self._scripts / "rabbitmq-server")]

    def environment(self) -> dict[str, str]:
        return os.environ | erlang_environment() | {
            "HOME": str(self.folder),
            "ERL_EPMD_PORT": str(self._mapper_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": self._node,
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(self._distribution_port),
            "RABBITMQ_MNESIA_BASE": str(self.folder / "data"),
            "RABBITMQ_LOG_BASE": str(self.folder),
            "RABBITMQ_PID_FILE": str(self._pid_file),
            "RABBITMQ_CONFIG_FILE": str(self.folder / "rabbitmq.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.folder / "enabled_plugins"),
            "RABBITMQ_PLUGINS_DIR": str(self._plugins),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": f"{_NO_BUSY_WAITING} {self.ticks}",
            "ERL_AFLAGS": _loading(self._modules_file),  # before RabbitMQ itself begins
        }  # fmt: skip

    def is_ready(self) -> bool:
        return answers(self.port) and answers(self.tls_port)  # which it opens last

    @property
    def pid(self) -> int:
        """Of the Erlang VM: killing the shell around it would leave it running."""
        deadline = time.monotonic() + PATIENCE
        while not (text := self._pid_file.read_text().strip() if self._pid_file.exists() else ""):
            assert time.monotonic() < deadline, "RabbitMQ wrote no pid file"
            time.sleep(0.05)
        return int(text)

    def evaluate(self, expression: str) -> str:
        """In the node, what rabbitmqctl does in a VM of its own that takes a second or, on busy cores, many."""
        cookie = (self.folder / ".erlang.cookie").read_text()
        command = ["erl_call", "-sname", self._node, "-c", cookie, "-e"]
        deadline = time.monotonic() + PATIENCE
        while True:
            done = subprocess.run(
                command, input=f"{expression}\n", env=self.environment(), capture_output=True, text=True, check=False
            )
            if "failed to connect" not in done.stderr or time.monotonic() > deadline:  # a busy node turns callers away
                assert done.stdout.startswith("{ok, "), done.stdout + done.stderr
                return done.stdout
            time.sleep(0.1)

    def start(self) -> None:
        self._start_mapper()
        super().start()
        if not RabbitMQ._modules:
            loaded = "[Module || {Module, File} <- code:all_loaded(), is_list(File)]"
            self.evaluate(f'file:write_file("{self._modules_file}", io_lib:format("~w.", [{loaded}])).')
            RabbitMQ._modules = self._modules_file.read_text()

    def _start_mapper(self) -> None:
        if self._mapper is None:  # else the node would start one that nobody stops
            quiet = subprocess.DEVNULL
            self._mapper = subprocess.Popen(["epmd"], env=self.environment(), stdin=quiet, stdout=quiet, stderr=quiet)

    def stop(self) -> None:
        super().stop()
        if self._mapper is not None:
            self._mapper.kill()
            self._mapper.wait()


@asynccontextmanager
async def suspended(server: RabbitMQ, queue: str) -> AsyncIterator[None]:
    """Its one member hears nothing, as if it had no majority."""
    name = f'rabbit_misc:r(<<"{server.vhost}">>, queue, <<"{queue}">>)'
    found = f"{{ok, Q}} = rabbit_amqqueue:lookup({name}), {{N, _}} = amqqueue:get_pid(Q)"
    await asyncio.to_thread(server.evaluate, f"{found}, sys:suspend(N).")
    try:
        yield
    finally:
        await asyncio.to_thread(server.evaluate, f"{found}, sys:resume(N).")


def _loading(modules: Path) -> str:
    if not modules.stat().st_size:
        return ""
    load = f'{{ok,[Modules]}}=file:consult("{modules}"),code:ensure_modules_loaded(Modules).'
    return f"-eval {load}".replace('"', '\\"')


@cache
def scripts() -> Path:
    """The folder of RabbitMQ's own scripts; not the wrappers on the PATH, which want to be root or `rabbitmq`."""
    with one_at_a_time("rabbitmq"):
        if not (_INSTALLED / "rabbitmq-server").exists() and os.geteuid() == 0:
            install("rabbitmq-server", _HELP)
        if (_INSTALLED / "rabbitmq-server").exists():
            return _INSTALLED
        return _unpacked() / "usr/lib/rabbitmq/bin"


def _itself_alone(scripts: Path, plugins: Path) -> Path:
    """A folder of plugins that holds only RabbitMQ's own part: to look at all seventy, none of them enabled, takes a
    quarter of the time of a start."""
    plugins.mkdir()
    for own in scripts.parent.glob("lib/*/plugins/rabbit-*"):
        (plugins / own.name).symlink_to(own)
    return plugins


@cache
def erlang_environment() -> dict[str, str]:
    """What lets an unpacked Erlang find itself."""
    root = Path(str(scripts()).removesuffix(str(_INSTALLED)) or "/")
    erlang = root / "usr/lib/erlang"
    return {"ERL_ROOTDIR": str(erlang), "PATH": f"{erlang / 'bin'}:{os.environ['PATH']}"} if root != Path("/") else {}


def _unpacked() -> Path:
    """For a user who may not install: fetches the packages and unpacks them, once."""
    root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "oraculo-tests" / "rabbitmq"
    if not (root / "usr/lib/rabbitmq/bin/rabbitmq-server").exists():
        if shutil.which("apt-get") is None:
            raise ServerMissing(f"no rabbitmq-server here; {_HELP}")
        packages = root / "packages"
        packages.mkdir(parents=True, exist_ok=True)
        names = [name for name in _needed() if name == "rabbitmq-server" or name.startswith("erlang-")]
        run(["apt-get", "download", *names], _HELP, cwd=packages)
        for package in packages.glob("*.deb"):
            run(["dpkg", "-x", str(package), str(root)], _HELP)
    _move_erlang(root / "usr/lib/erlang")
    return root


def _move_erlang(erlang: Path) -> None:
    """Its scripts name the place where the package would be; those of Debian 13 whatever ERL_ROOTDIR says."""
    for script in (erlang / "bin" / "erl", *erlang.glob("erts-*/bin/erl")):
        moved = (text := script.read_text()).replace("=/usr/lib/erlang\n", f"={erlang}\n")
        if moved != text:
            script.write_text(moved)


def _needed() -> list[str]:
    options = ["--recurse", "--no-recommends", "--no-suggests", "--no-conflicts", "--no-breaks", "--no-replaces"]
    told = run(["apt-cache", "depends", *options, "--no-enhances", "rabbitmq-server"], _HELP)
    return sorted({line.strip() for line in told.splitlines() if line and line[0].isalnum()})
