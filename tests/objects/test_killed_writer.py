"""A writer that is killed at any instruction: what it said is put is there, and whatever has a name is whole."""

import asyncio
import re
import sys
from hashlib import blake2b
from pathlib import Path

from oraculo.core.result_reference import encode_reference, read_reference
from oraculo.ports.objects import get_result, put_result
from oraculo.stores.objects import FolderObjects

ROUNDS = 5
_HASH = re.compile(r"-([0-9a-f]{32})\.json$")


async def write_for_ever(folder: str) -> None:
    objects = FolderObjects(folder)
    await objects.claim("um")
    number = 0
    while True:
        body = b'{"n":"' + str(number).encode() * 60_000 + b'"}'
        reference = await put_result(objects, "run-1", f"t{number}", body)
        print(encode_reference(reference).decode(), flush=True)
        number += 1


async def test_kill_nine_leaves_nothing_by_halves(tmp_path: Path) -> None:
    program = f"import asyncio; from {__name__} import write_for_ever; asyncio.run(write_for_ever({str(tmp_path)!r}))"
    for lines in range(1, ROUNDS + 1):
        writer = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
        assert writer.stdout is not None
        put = [await asyncio.wait_for(writer.stdout.readline(), 30) for _ in range(lines * 3)]
        writer.kill()
        await writer.wait()
        for line in put:
            reference = read_reference("run-1", line.strip())
            assert reference is not None
            await get_result(FolderObjects(tmp_path), reference)
        assert not broken(tmp_path)


def broken(folder: Path) -> list[str]:
    """Files whose name does not hold the hash of what is in them."""
    files = list(folder.rglob("*.json"))
    assert files
    return [
        file.name
        for file in files
        if (told := _HASH.search(file.name)) is None
        or told[1] != blake2b(file.read_bytes(), digest_size=16).hexdigest()
    ]
