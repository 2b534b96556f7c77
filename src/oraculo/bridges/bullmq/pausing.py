"""Queues that are paused, by BullMQ up to version 5.

It keeps their jobs in a list of its own, `paused`, which takes the place of `wait` when the queue is resumed: what was
in `wait` is then in no list, and nobody works on it. Version 6 has no such list any more, and neither have the scripts
of bullmq for Python, which put every job in `wait`. So these are given an ending, which sets right what they did.
"""

from typing import Any

# `version` is written by BullMQ's own queues, from some 5 on.
_ENDING = """
local function original()
{script}
end
local result = original()
local meta, wait, paused = {meta}, {wait}, {paused}
if redis.call('HEXISTS', meta, 'paused') == 1 then
  local major = string.match(redis.call('HGET', meta, 'version') or '', '^bullmq:(%d+)')
  if not major or tonumber(major) < 6 then
    while redis.call('RPOPLPUSH', wait, paused) do end
  end
end
return result
"""
_BY_WORKERS = ("moveStalledJobsToWait", "moveToActive", "moveToDelayed", "moveToFinished", "retryJob")


def mind_pauses_when_adding(commands: dict[str, Any], client: Any) -> None:
    """`commands`: bullmq's scripts, of any queue."""
    _extend(commands, client, "addStandardJob", meta="KEYS[3]", wait="KEYS[1]", paused="KEYS[2]")


def mind_pauses_of(base: str, commands: dict[str, Any], client: Any) -> None:
    """`commands`: the scripts of a worker of the queue whose keys begin with `base`."""
    keys = {name: _literal(base + name) for name in ("meta", "wait", "paused")}
    for name in (*_BY_WORKERS, "updateJobScheduler"):
        _extend(commands, client, name, **keys)


def _extend(commands: dict[str, Any], client: Any, name: str, **keys: str) -> None:
    commands[name] = client.register_script(_ENDING.format(script=commands[name].script, **keys))


def _literal(text: str) -> str:
    """In Lua, whatever is in it."""
    return '"' + "".join(f"\\{byte:03d}" for byte in text.encode()) + '"'
