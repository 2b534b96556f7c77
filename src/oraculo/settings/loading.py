"""The loading of the settings from the file and the environment, with all faults at once.

Each field of a section is `[section] field = …` in the file and `ORACULO_SECTION_FIELD` in the environment, which
wins. An empty variable counts as not set, because `VAR=` means that in a compose file.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

import msgspec

from oraculo.core.webhook_rules import allow_fault
from oraculo.errors import Fault, InvalidSettings
from oraculo.pipeline.queue_rules import patterns_fault
from oraculo.settings.keys import keys_fault
from oraculo.settings.sections import Route, Section, Settings, split_list
from oraculo.settings.values import (
    broker_url_fault,
    bullmq_name_fault,
    bullmq_queues_fault,
    objects_url_fault,
    proxies_fault,
    route_fault,
    secret_fault,
    store_url_fault,
)
from oraculo.wire.naming import nearest

DEFAULT_FILE = "oraculo.toml"
PREFIX = "ORACULO_"
ROUTES = "rotas"

# The command line and the tests read these; they are no settings of the server.
_NOT_SETTINGS = re.compile(r"ORACULO_(URL|CONFIG|API_KEY|TEST_.*)")
# Kubernetes sets variables of this form in every pod for a service named `oraculo` or `oraculo-api`.
_KUBERNETES_NAME = re.compile(r"ORACULO_(.*_)?(SERVICE_(HOST|PORT)(_.*)?|PORT_\d+_(TCP|UDP|SCTP)(_.*)?)")
_KUBERNETES_PORT = re.compile(r"(tcp|udp|sctp)://.*")


class Place(NamedTuple):
    """The place of a value. `section` is empty for values outside any section."""

    section: str
    field: str


class Given(NamedTuple):
    """A value that was set, with `where` it was set. Text of the environment is parsed."""

    where: str
    value: object
    is_text: bool


def load_settings(environ: Mapping[str, str] | None = None, file: Path | None = None) -> Settings:
    """Return the settings. Raises InvalidSettings with every fault.

    Without `file` it reads $ORACULO_CONFIG, else ./oraculo.toml if it exists.
    """
    environ = os.environ if environ is None else environ
    faults: list[Fault] = []
    path = _chosen_file(environ, file)
    given = _from_document(_read(path, faults), path, faults) if path else {}
    given |= _from_environment(environ, faults)
    settings = _build(given, faults)
    if faults:
        raise InvalidSettings(faults)
    return settings


# -- the file ---------------------------------------------------------------------------------------------------


def _chosen_file(environ: Mapping[str, str], file: Path | None) -> Path | None:
    if file is not None:
        return file
    if named := environ.get("ORACULO_CONFIG"):
        return Path(named)
    default = Path(DEFAULT_FILE)
    return default if default.is_file() else None


def _read(path: Path, faults: list[Fault]) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8-sig"))
    except FileNotFoundError:
        faults.append(Fault(str(path), "there is no such file"))
    except OSError as error:
        faults.append(Fault(str(path), f"cannot be read: {error.strerror}"))
    except UnicodeDecodeError as error:
        faults.append(Fault(str(path), f"is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}"))
    except tomllib.TOMLDecodeError as error:
        faults.append(Fault(str(path), f"is not TOML: {error}"))
    except ValueError:  # `int`, which tomllib uses, has a limit of digits
        faults.append(Fault(str(path), "has a number of more digits than can be read"))
    except RecursionError:
        faults.append(Fault(str(path), "has lists or tables too deep in one another"))
    return {}


def _from_document(document: Mapping[str, Any], path: Path, faults: list[Fault]) -> dict[Place, Given]:
    given: dict[Place, Given] = {}
    for key, value in document.items():
        where = f"{path.name}: {key}"
        if key in _SECTIONS:
            given |= _from_table(key, value, where, faults)
        elif Place("", key) in _FIELD_TYPES:
            given[Place("", key)] = Given(where, value, is_text=False)
        else:
            faults.append(Fault(where, f"is not a known key{nearest(key, _SECTIONS.keys() | {'pipelines'})}"))
    return given


def _from_table(section: str, table: object, where: str, faults: list[Fault]) -> dict[Place, Given]:
    if not isinstance(table, dict):
        faults.append(Fault(where, f"must be a table: [{section}] on a line of its own, its keys below"))
        return {}
    given: dict[Place, Given] = {}
    for key, value in table.items():
        place = Place(section, key)
        if section == ROUTES and not key:
            faults.append(Fault(f"{where}.", "a route needs a name"))
        elif section == ROUTES or place in _FIELD_TYPES:
            given[place] = Given(f"{where}.{key}", value, is_text=False)
        else:
            known = [place.field for place in _FIELD_TYPES if place.section == section]
            faults.append(Fault(f"{where}.{key}", f"is not a known key{nearest(key, known)}"))
    return given


# -- the environment --------------------------------------------------------------------------------------------


def _from_environment(environ: Mapping[str, str], faults: list[Fault]) -> dict[Place, Given]:
    given: dict[Place, Given] = {}
    for name in sorted(environ):
        if not name.startswith(PREFIX) or _is_not_ours(name, environ[name]):
            continue
        if (place := _VARIABLES.get(name)) is None:
            _suspect(name, faults)
        elif environ[name].strip():
            _take(given, place, Given(name, environ[name].strip(), is_text=True), faults)
    return given


def _is_not_ours(name: str, value: str) -> bool:
    if _NOT_SETTINGS.fullmatch(name) or _KUBERNETES_NAME.fullmatch(name):
        return True
    return name.endswith("_PORT") and _KUBERNETES_PORT.fullmatch(value) is not None


def _suspect(name: str, faults: list[Fault]) -> None:
    """Add a fault for a misspelled variable. Others that only begin like ours are left alone."""
    in_section = name.removeprefix(PREFIX).partition("_")[0].lower() in _SECTIONS
    if in_section or difflib.get_close_matches(name, _VARIABLES, n=1, cutoff=0.8):
        faults.append(Fault(name, f"is not a known variable{nearest(name, _VARIABLES)}"))


def _take(given: dict[Place, Given], place: Place, value: Given, faults: list[Fault]) -> None:
    other = given.setdefault(place, value)
    if other.value != value.value:
        faults.append(Fault(value.where, f"says something else than {other.where}; set one of them"))


# -- from what was given to Settings ----------------------------------------------------------------------------


def _build(given: Mapping[Place, Given], faults: list[Fault]) -> Settings:
    values: dict[str, dict[str, Any]] = {}
    for place, item in given.items():
        try:
            values.setdefault(place.section, {})[place.field] = _checked(place, item)
        except ValueError as error:
            faults.append(Fault(item.where, str(error)))
    top = values.pop("", {})
    return Settings(**top, **{name: _SECTIONS[name](**fields) for name, fields in values.items()})


def _checked(place: Place, item: Given) -> Any:
    """Return the value in its field's type. Raises ValueError with the fault."""
    kind = _type_of(place)
    try:
        value = msgspec.convert(_parsed(item, kind), kind, strict=not item.is_text)
    except msgspec.ValidationError:
        raise ValueError(_wrong(item.value, kind)) from None
    if (check := _CHECKS.get(place) or _CHECKS.get(Place(place.section, ""))) and (fault := check(value)):
        raise ValueError(fault)
    return value


def _parsed(item: Given, kind: Any) -> object:
    """Lower the case of a choice, and split a list of the environment at its commas. Raises ValueError."""
    plain = get_args(kind)[0]
    if isinstance(item.value, str) and get_origin(plain) is Literal:
        return item.value.lower()
    if item.is_text and get_origin(plain) is tuple:
        if not (parts := split_list(str(item.value))):  # as of "$A,$B" when neither is set
            raise ValueError("has commas and nothing between them: write one or more, as a,b, or leave it unset")
        return parts
    return item.value


def _wrong(value: object, kind: Any) -> str:
    meta = get_args(kind)[1]
    got = f"{type(value).__name__}, which is not shown" if (meta.extra or {}).get("secret") else repr(value)[:60]
    return f"must be {meta.description}; got {got}"


def _type_of(place: Place) -> Any:
    return Route if place.section == ROUTES else _FIELD_TYPES[place]


def _section_types() -> dict[str, type[Section]]:
    fields = msgspec.structs.fields(Settings)
    return {f.name: f.type for f in fields if isinstance(f.type, type) and issubclass(f.type, Section)}


def _field_types() -> dict[Place, Any]:
    types = {Place("", f.name): f.type for f in msgspec.structs.fields(Settings) if f.name not in _SECTIONS}
    for name, section in _section_types().items():
        types |= {Place(name, f.name): f.type for f in msgspec.structs.fields(section)}
    return types


def _variables() -> dict[str, Place]:
    """Return the variable of each field, and the short name of the queues' prefix."""
    derived = {PREFIX + "_".join(filter(None, place)).upper(): place for place in _FIELD_TYPES}
    return derived | {"ORACULO_PREFIX": Place("broker", "prefix")}


# Users name the routes, so their section is a plain dict.
_SECTIONS: dict[str, Callable[..., Any]] = {**_section_types(), ROUTES: dict}
_FIELD_TYPES = _field_types()
_VARIABLES = _variables()
_CHECKS: dict[Place, Callable[[Any], str | None]] = {
    Place("broker", "url"): broker_url_fault,
    Place("store", "url"): store_url_fault,
    Place("objects", "url"): objects_url_fault,
    Place("api", "keys"): keys_fault,
    Place("api", "proxies"): proxies_fault,
    Place("webhook", "secret"): secret_fault,
    Place("queues", "allow"): patterns_fault,
    Place("webhook", "allow"): allow_fault,
    Place("bullmq", "queues"): bullmq_queues_fault,
    Place("bullmq", "entry"): bullmq_name_fault,
    Place(ROUTES, ""): route_fault,
}
