"""The HTTP client of the commands that ask a server: JSON in, JSON out, and each refusal as one sentence."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from oraculo.core.loopback import is_loopback
from oraculo.errors import InvalidInput, OraculoError

if TYPE_CHECKING:
    import httpx2

_CONNECT_SECONDS = 5.0
_ANSWER_SECONDS = 35.0  # the server gives up waiting for its store after 30
_SILENCE_SECONDS = 90.0  # of a live stream, which sends a comment every 15 s


class Unreachable(OraculoError):
    """No answer from the server. With `was_reached` it may have done what was asked."""

    def __init__(self, message: str, *, was_reached: bool) -> None:
        self.was_reached = was_reached
        super().__init__(message)


class Refused(OraculoError):
    """A refusal by the server."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


class ServerClient:
    """A connection to a server. Use it as a context manager. Every call raises Unreachable or Refused."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        import httpx2  # here, because it is a third of the time that `--help` takes

        self.url = _checked(url)
        self._http = httpx2.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {header('--api-key', api_key)}"} if api_key else {},
            timeout=httpx2.Timeout(_ANSWER_SECONDS, connect=_CONNECT_SECONDS),
            verify=self.url.startswith("https:"),  # certificates take long to load, and plain HTTP has none
            trust_env=not is_loopback(urlsplit(self.url).hostname or ""),  # no proxy stands before this machine
        )

    def __enter__(self) -> "ServerClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def get(self, path: str, **parameters: object) -> Any:
        given = {key: str(value) for key, value in parameters.items() if value is not None}
        return self._ask("GET", path, params=given)

    def post(self, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None) -> Any:
        return self._ask("POST", path, content=body, headers={**_JSON, **(headers or {})} if body else headers)

    def put(self, path: str, body: bytes, kind: str) -> Any:
        return self._ask("PUT", path, content=body, headers={"Content-Type": kind})

    def delete(self, path: str) -> Any:
        return self._ask("DELETE", path)

    def post_waiting(self, path: str, body: bytes, headers: Mapping[str, str], wait: float) -> tuple[int, Any]:
        """Post, wait up to `wait` seconds longer than usual, and return the HTTP status with the answer."""
        with self._translated():
            response = self._http.post(path, content=body, headers={**_JSON, **headers}, timeout=wait + _ANSWER_SECONDS)
        return response.status_code, self._answer(response)

    @contextmanager
    def live(self, path: str, after: int) -> "Iterator[Iterator[httpx2.ServerSentEvent]]":
        """Open a stream of server-sent events that begins after the entry `after`."""
        headers = {"Last-Event-ID": str(after)} if after else {}
        with self._translated(), self._http.sse(path, headers=headers, timeout=_SILENCE_SECONDS) as source:
            if source.response.status_code != 200:
                source.response.read()
                self._answer(source.response)
            yield iter(source)

    def _ask(self, method: str, path: str, **options: Any) -> Any:
        with self._translated():
            response = self._http.request(method, path, **options)
        return self._answer(response)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        import httpx2

        try:
            yield
        except httpx2.TimeoutException as error:
            late = f"{self.url} did not answer in time ({type(error).__name__})"
            raise Unreachable(late, was_reached=not isinstance(error, httpx2.ConnectTimeout)) from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise Unreachable(
                f"no server answers at {self.url} ({error}); start one with `oraculo dev` or `oraculo serve`, "
                "or name another with --url or ORACULO_URL",
                was_reached=isinstance(error, httpx2.ReadError | httpx2.WriteError | httpx2.RemoteProtocolError),
            ) from None

    def _answer(self, response: "httpx2.Response") -> Any:
        document = _document(response)
        if response.is_success and (document is not None or not response.content):
            return document
        if isinstance(document, dict):
            raise Refused(response.status_code, _why(response.status_code, document))
        status = response.status_code
        raise Refused(status, f"{self.url} answered {status} and not as ORÁCULO does; is --url or ORACULO_URL right?")


_JSON = {"Content-Type": "application/json"}


def run_path(run_id: str, action: str = "") -> str:
    return f"/orquestracoes/{quote(run_id, safe='')}{action}"


def queue_path(queue: str, action: str = "") -> str:
    return f"/filas/{quote(queue, safe='')}/dlq{action}"


def header(option: str, text: str) -> str:
    """Return a text for a header. Raises InvalidInput, which does not show the text: it may be a secret."""
    if not (text.isascii() and text.isprintable()):
        raise InvalidInput.at(option, "must be plain ASCII in one line, as chave-1: a header can hold nothing else")
    return text


def _checked(url: str) -> str:
    if not _is_server_url(url):
        raise OraculoError(f"--url: {url!r} is not the URL of a server; as http://127.0.0.1:8000")
    return url.rstrip("/")


def _is_server_url(url: str) -> bool:
    import httpx2

    try:
        httpx2.URL(url)
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except (ValueError, httpx2.InvalidURL):
        return False


def _document(response: "httpx2.Response") -> Any:
    try:
        return json.loads(response.content)
    except ValueError:
        return None


def _why(status: int, problem: dict[str, Any]) -> str:
    """Return a problem of RFC 9457 as one line."""
    if status == 401:
        return "the server wants an API key that it knows; give it with --api-key or ORACULO_API_KEY"
    if isinstance(parts := problem.get("partes"), dict):
        return failing(parts)
    detail = problem.get("detail") or problem.get("title") or f"the server answered {status}"
    faults = "; ".join(_fault(each) for each in problem.get("erros") or () if isinstance(each, dict))
    return faults or str(detail)


def failing(parts: dict[str, Any]) -> str:
    """Return the faults of the parts in an answer of `GET /health/ready`."""
    return "; ".join(f"{name}: {part['problema']}" for name, part in parts.items() if not part["ok"])


def _fault(fault: dict[str, Any]) -> str:
    return ": ".join(str(part) for part in (fault.get("campo"), fault.get("motivo")) if part)
