"""Corrects the scripts of bullmq for Python, so that queues which BullMQ up to version 5 paused lose no job.

BullMQ 5 keeps the jobs of a paused queue in the list `paused`, and puts that list in the place of `wait` when the queue
is resumed: a job in `wait` is then in no list, and no worker finds it. BullMQ 6 has no such list, and neither have the
scripts of bullmq for Python: they put every job into `wait`. The corrected scripts move it to `paused` afterwards.
"""

from typing import Any

# BullMQ's own queues write `version`, from some version 5 on.
_CORRECTED = """
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
_OF_WORKERS = (
    "moveStalledJobsToWait",
    "moveToActive",
    "moveToDelayed",
    "moveToFinished",
    "retryJob",
    "updateJobScheduler",
)


def correct_adding(commands: dict[str, Any], client: Any) -> None:
    """Correct the script that adds a job, to any queue."""
    _correct(commands, client, "addStandardJob", meta="KEYS[3]", wait="KEYS[1]", paused="KEYS[2]")


def correct_worker(base: str, commands: dict[str, Any], client: Any) -> None:
    """Correct the scripts of a worker, whose queue's keys begin with `base`."""
    keys = {name: _lua_text(base + name) for name in ("meta", "wait", "paused")}
    for name in _OF_WORKERS:
        _correct(commands, client, name, **keys)


def _correct(commands: dict[str, Any], client: Any, name: str, **keys: str) -> None:
    commands[name] = client.register_script(_CORRECTED.format(script=commands[name].script, **keys))


def _lua_text(text: str) -> str:
    """Return a literal of Lua for any text."""
    return '"' + "".join(f"\\{byte:03d}" for byte in text.encode()) + '"'
