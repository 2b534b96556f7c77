"""The import of a user's worker app, named as `MODULE:APP`."""

import importlib
import sys
import traceback
from pathlib import Path
from types import ModuleType

from oraculo.errors import Fault, InvalidSettings
from oraculo.wire.answers import describe
from oraculo.worker.app import App

_NOT_A_FILE = "give the module as Python imports it, as meus_workers:app, and not its file"


def load_app(target: str) -> App:
    """Return the app. Raises InvalidSettings, which names the wrong part of `target`."""
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute:
        raise _wrong(target, "must be MODULE:APP, as meus_workers:app")
    if "/" in module_name:
        raise _wrong(target, f"must be MODULE:APP; {_NOT_A_FILE}")
    module = _module(target, module_name)
    found = getattr(module, attribute, None)
    if not isinstance(found, App):
        names = sorted(name for name, value in vars(module).items() if isinstance(value, App))
        has = f"it has {', '.join(names)}" if names else "it has none; make one with oraculo.worker.App"
        raise _wrong(target, f"module '{module_name}' has no App '{attribute}'; {has}")
    if not found.handlers:
        raise _wrong(target, "the app has no handlers: decorate a function with its queue first")
    return found


def _module(target: str, name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:  # unlike `python -m`, a console script does not import from the current folder
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's module may raise anything
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{name}.".startswith(f"{missing}."):
            hint = f"; {_NOT_A_FILE}" if name.endswith(".py") else ""
            raise _wrong(target, f"there is no module '{missing}' in {Path.cwd()} or installed{hint}") from None
        raise _wrong(target, f"importing it failed: {_with_place(error)}") from None


def _with_place(error: BaseException) -> str:
    described = describe(error)
    if isinstance(error, SyntaxError):  # its message names file and line
        return described
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{described} ({frame.filename}, line {frame.lineno})"


def _wrong(target: str, problem: str) -> InvalidSettings:
    return InvalidSettings(Fault(target or "MODULE:APP", problem))
