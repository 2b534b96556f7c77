"""nats-py's client, which connects, does TLS, credentials and pings, and reads; here without its second lives."""

import asyncio
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import ParseResult

import nats.errors
from nats.aio.client import Client
from nats.aio.transport import TcpTransport

from oraculo.clients.dialing import dialed

_FAREWELL = 1.0  # seconds in which the tasks and the socket of an ended connection are gone
_REFUSAL = re.compile(rb"-ERR '(.*)'")

Receive = Callable[[bytes, bytes, bytes, bytes | None], None]  # subject, reply subject, data, headers; must not raise


class _Transport(TcpTransport):
    """nats-py's own tries the addresses of a name one by one, and may never come to the one that answers."""

    def __bool__(self) -> bool:
        return True  # also before it is connected: else nats-py would take one of its own

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        """Whoever connects sets the limit of time."""
        sock = await dialed(uri.hostname or "", uri.port or 0)
        streams = await asyncio.open_connection(sock=sock, limit=buffer_size)
        self._io_reader, self._io_writer = self._bare_io_reader, self._bare_io_writer = streams


class OneLifeClient(Client):
    """It overrides what nats-py does when the connection breaks, where it may wait for a frozen peer, forget to call
    back and leave tasks behind; and what it does with a message, where it makes a queue and a task for each
    subscription."""

    def __init__(self, on_lost: Callable[[str], None], on_complaint: Callable[[str], None], *, needs_tls: bool) -> None:
        super().__init__()
        self._transport = _Transport()  # type: ignore[no-untyped-call, unused-ignore]
        self._on_lost = on_lost
        self._on_complaint = on_complaint
        self._needs_tls = needs_tls
        self.problem: Exception | None = None  # the last one it told of
        self.complaint = ""  # what the server forbade last
        self.heard = 0
        self._receivers: dict[int, Receive] = {}

    async def note(self, problem: Exception) -> None:
        self.problem = problem

    def fail(self, why: str) -> None:
        if self._status != Client.CLOSED:
            self.abort()
            self._on_lost(why)

    def abort(self) -> None:
        """Ends it now: what was not written is dropped, and nobody is waited for."""
        self._status = Client.CLOSED
        self._pending, self._pending_data_size = [], 0
        self._receivers.clear()
        for task in self._own_tasks():
            if task is not asyncio.current_task():
                task.cancel()
        for writer in self._writers():
            writer.transport.abort()

    async def ended(self) -> None:
        """Returns once an aborted connection has left nothing behind."""
        tasks = [task for task in self._own_tasks() if task is not asyncio.current_task()]
        if tasks:
            await asyncio.wait(tasks, timeout=_FAREWELL)
        # An aborted socket is closed in the loop's next turn, one under TLS in the turn after that. Asking the writers
        # would not do: the plain one never hears of it once TLS has taken its socket over.
        for _ in range(3):
            await asyncio.sleep(0)

    @property
    def is_closing(self) -> bool:
        """Its socket is, which its reader hears of a turn later: what is written now is lost, and uvloop raises an
        error of its own."""
        return any(writer.transport.is_closing() for writer in self._writers())

    def write(self, data: bytes) -> None:
        """Past nats-py's buffer and the task that empties it. All that is sent here goes this way, in order."""
        assert self._transport is not None
        self._transport.write(data)

    def listen(self, subject: str, receive: Receive) -> int:
        """Returns the number of the subscription."""
        self._sid += 1
        self._receivers[self._sid] = receive
        self.write(b"SUB %b  %d\r\n" % (subject.encode(), self._sid))
        return self._sid

    def stop_deliveries(self, number: int) -> None:
        """Tells the server; what it has sent already is still received."""
        self.write(b"UNSUB %d\r\n" % number)

    def forget(self, number: int) -> None:
        self._receivers.pop(number, None)

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        self.heard += 1
        receive = self._receivers.get(sid)
        if receive is not None:
            receive(subject, reply, data, headers)

    def note_answer(self) -> None:
        """It counts as one to the pings, which may wait behind megabytes in the socket."""
        self._pings_outstanding = 0

    def _own_tasks(self) -> list["asyncio.Task[Any]"]:
        known = (self._reading_task, self._ping_interval_task, self._flusher_task)
        return [task for task in known if task is not None and not task.done()]

    def _writers(self) -> list[asyncio.StreamWriter]:
        names = ("_io_writer", "_bare_io_writer")
        found = [getattr(self._transport, name, None) for name in names]
        return [writer for writer in dict.fromkeys(found) if writer is not None]

    async def _process_connect_init(self) -> None:
        """A server that has as many connections as it may says so and hangs up before it is written to: nats-py only
        tells that nothing can be written."""
        try:
            await super()._process_connect_init()
        except ConnectionError as error:
            if refusal := _REFUSAL.match(self._unread()):
                raise nats.errors.Error(refusal[1].decode(errors="replace")) from error
            raise

    def _unread(self) -> bytes:
        """What came before the connection broke, which its reader gives to nobody after that."""
        return bytes(getattr(getattr(self._transport, "_io_reader", None), "_buffer", b""))

    async def _process_op_err(self, e: Exception) -> None:
        self.fail(str(e).removeprefix("nats: ") or type(e).__name__)

    async def _process_err(self, err_msg: str) -> None:
        if "permissions violation" in err_msg:
            self.complaint = err_msg.strip("'")
            self._on_complaint(self.complaint)
        else:
            self.fail(f"the server said {err_msg}")

    async def _read_loop(self) -> None:
        await super()._read_loop()
        self.fail("nothing is read from it any more")

    def _connect_command(self) -> bytes:
        """Without this a `tls://` URL would send its password in the clear to a server that has no TLS."""
        if self._needs_tls and not self._server_info.get("tls_required"):
            raise nats.errors.SecureConnWantedError
        return super()._connect_command()
