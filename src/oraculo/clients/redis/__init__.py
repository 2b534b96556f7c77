"""Redis' protocol: `connection` is one connection, and `link` is a connection that many share."""

from oraculo.clients.redis.connection import (
    Command,
    Connection,
    Errors,
    Part,
    ReplyError,
    connect,
    database_of,
    error_code,
    translated,
)
from oraculo.clients.redis.info import read_info, version_of
from oraculo.clients.redis.link import RedisLink
from oraculo.clients.redis.script import Script

__all__ = [
    "Command",
    "Connection",
    "Errors",
    "Part",
    "RedisLink",
    "ReplyError",
    "Script",
    "connect",
    "database_of",
    "error_code",
    "read_info",
    "translated",
    "version_of",
]
