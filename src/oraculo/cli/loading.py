"""`MODULE:APP`: finding a user's worker app."""

import importlib
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from oraculo.errors import Fault, InvalidSettings

if TYPE_CHECKING:
    from oraculo.worker import App


Found = TypeVar("Found")
_NOT_A_FILE = "give the module as Python imports it, as meus_workers:app, and not its file"


def load_app(target: str) -> "App":
    """Raises InvalidSettings, saying which part of `target` is wrong."""
    from oraculo.worker import App

    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute:
        raise _wrong(target, "must be MODULE:APP, as meus_workers:app")
    if "/" in module_name:
        raise _wrong(target, f"must be MODULE:APP; {_NOT_A_FILE}")
    module = _module(target, module_name)
    found: Any = _told(target, "looking into it", lambda: getattr(module, attribute, None))
    if not issubclass(type(found), App):  # isinstance() asks a lazy object for its class, and it may raise anything
        names = sorted(name for name, value in vars(module).items() if issubclass(type(value), App))
        has = f"it has {', '.join(names)}" if names else "it has none; make one with oraculo.worker.App"
        raise _wrong(target, f"module '{module_name}' has no App '{attribute}'; {has}")
    if not _told(target, "asking for its handlers", lambda: found.handlers):
        raise _wrong(target, "the app has no handlers: decorate a function with its queue first")
    app: App = found
    return app


def _module(target: str, name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:  # a console script, unlike `python -m`, does not look where it is run
        sys.path.insert(0, here)
    return _told(target, "importing it", lambda: _imported(target, name))


def _imported(target: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        hint = f"; {_NOT_A_FILE}" if name.endswith(".py") else ""
        raise _wrong(target, f"there is no module '{error.name}' in {Path.cwd()} or installed{hint}") from None


def _told(target: str, what: str, act: Callable[[], Found]) -> Found:
    try:
        return act()
    except (KeyboardInterrupt, InvalidSettings):
        raise
    except BaseException as error:  # noqa: BLE001 - the user's module may raise anything, SystemExit too
        raise _wrong(target, f"{what} failed: {_where(error)}") from None


def _where(error: BaseException) -> str:
    from oraculo.wire.answers import describe

    told = describe(error)
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError) and frames and frames[-1].filename.startswith("<frozen"):
        return told  # of a module that cannot be read: the message names file and line
    return f"{told} ({frames[-1].filename}, line {frames[-1].lineno})" if frames else told


def _wrong(target: str, problem: str) -> InvalidSettings:
    return InvalidSettings(Fault(target or "MODULE:APP", problem))
