"""nats-py's client, reduced to one connection that ends for good when it breaks.

nats-py connects, does TLS, credentials and pings, and reads. Overridden here: its reconnects, which buffer in silence
and may wait for a frozen peer; and its way with a message, which makes a queue and a task for each subscription.
"""

import asyncio
from collections.abc import Callable
from typing import Any
from urllib.parse import ParseResult

import nats.errors
from nats.aio.client import Client
from nats.aio.transport import TcpTransport

from oraculo.clients.dialing import dialed

_FAREWELL = 1.0  # seconds in which the tasks of an ended connection are gone

Receive = Callable[[bytes, bytes, bytes, bytes | None], None]  # subject, reply subject, data, headers; must not raise


class _Transport(TcpTransport):
    """A transport that tries all addresses of a name; nats-py's own may never come to the one that answers."""

    def __bool__(self) -> bool:
        return True  # also before it is connected: else nats-py would take one of its own

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        """Connect without a limit of time, which the caller sets."""
        sock = await dialed(uri.hostname or "", uri.port or 0)
        streams = await asyncio.open_connection(sock=sock, limit=buffer_size)
        self._io_reader, self._io_writer = self._bare_io_reader, self._bare_io_writer = streams


class OneLifeClient(Client):
    """A client that never reconnects.

    It calls `on_lost` with the reason when the connection breaks, and `on_complaint` when the server forbids something.
    """

    def __init__(self, on_lost: Callable[[str], None], on_complaint: Callable[[str], None], *, needs_tls: bool) -> None:
        super().__init__()
        self._transport = _Transport()  # type: ignore[no-untyped-call, unused-ignore]
        self._on_lost = on_lost
        self._on_complaint = on_complaint
        self._needs_tls = needs_tls
        self.problem: Exception | None = None  # the last one that nats-py reported
        self.heard = 0  # messages
        self._receivers: dict[int, Receive] = {}  # by subscription

    async def note(self, problem: Exception) -> None:
        self.problem = problem

    def fail(self, why: str) -> None:
        if self._status != Client.CLOSED:
            self.abort()
            self._on_lost(why)

    def abort(self) -> None:
        """End the connection now, without waiting for anybody. Unwritten data is dropped."""
        self._status = Client.CLOSED
        self._pending, self._pending_data_size = [], 0
        self._receivers.clear()
        for task in self._own_tasks():
            task.cancel()
        for writer in self._writers():
            writer.transport.abort()

    async def ended(self) -> None:
        """Return once an aborted connection has left nothing behind."""
        if tasks := self._own_tasks():
            await asyncio.wait(tasks, timeout=_FAREWELL)
        # An aborted socket is closed in the loop's next turn, one under TLS in the turn after that. The writers cannot
        # be asked: the plain one never hears of it once TLS has taken its socket over.
        for _ in range(3):
            await asyncio.sleep(0)

    @property
    def is_closing(self) -> bool:
        """Return True when the socket is closing, one turn before the reader hears of it."""
        return any(writer.transport.is_closing() for writer in self._writers())

    def write(self, data: bytes) -> None:
        """Write past nats-py's buffer and the task that empties it. Everything here goes this way, in order."""
        assert self._transport is not None
        self._transport.write(data)

    def listen(self, subject: str, receive: Receive) -> int:
        """Subscribe, and return the number of the subscription."""
        self._sid += 1
        self._receivers[self._sid] = receive
        self.write(b"SUB %b  %d\r\n" % (subject.encode(), self._sid))
        return self._sid

    def stop_deliveries(self, number: int) -> None:
        """Unsubscribe at the server. Messages that are on their way are still received."""
        self.write(b"UNSUB %d\r\n" % number)

    def forget(self, number: int) -> None:
        self._receivers.pop(number, None)

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        self.heard += 1
        self._pings_outstanding = 0  # a pong may wait behind megabytes in the socket
        if (receive := self._receivers.get(sid)) is not None:
            receive(subject, reply, data, headers)

    def _own_tasks(self) -> list["asyncio.Task[Any]"]:
        known = (self._reading_task, self._ping_interval_task, self._flusher_task)
        return [task for task in known if task is not None and not task.done() and task is not asyncio.current_task()]

    def _writers(self) -> list[asyncio.StreamWriter]:
        found = [getattr(self._transport, name, None) for name in ("_io_writer", "_bare_io_writer")]
        return [writer for writer in dict.fromkeys(found) if writer is not None]

    async def _process_op_err(self, e: Exception) -> None:
        self.fail(str(e).removeprefix("nats: ") or type(e).__name__)

    async def _process_err(self, err_msg: str) -> None:
        if "permissions violation" in err_msg:
            self._on_complaint(err_msg.strip("'"))
        else:
            self.fail(f"the server said {err_msg}")

    async def _read_loop(self) -> None:
        await super()._read_loop()
        self.fail("nothing is read from it any more")

    def _connect_command(self) -> bytes:
        """Refuse a server without TLS where the URL asks for it: the password would travel in the clear."""
        if self._needs_tls and not self._server_info.get("tls_required"):
            raise nats.errors.SecureConnWantedError
        return super()._connect_command()
