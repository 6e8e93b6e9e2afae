"""Names of this run's shared memory, and the removal of what dead processes left of theirs.

A segment is called jaxrl-RUNID-..., where RUNID names the run and the process; those of a server's gateway
jaxrl-gateway-PID-... . A process that was killed leaves its segments; they hold memory until they are removed.
"""

import contextlib
import hashlib
import os
import re
import shutil
from pathlib import Path

SHM = Path("/dev/shm")
NAME = re.compile(r"jaxrl-(?:(?P<run>[0-9a-f]+)\.|gateway-)(?P<pid>\d+)-")


def run_id(folder: Path) -> str:
    """RUNID of the run in `folder`, which one process at a time holds."""
    name = hashlib.blake2b(os.fsencode(folder.resolve()), digest_size=6).hexdigest()
    return f"{name}.{os.getpid()}"


def sweep(own: str, shm: Path = SHM) -> None:
    """Removes what earlier processes of the run with id `own` left, and what belongs to processes that are gone."""
    run, _, me = own.partition(".")
    for path in shm.glob("jaxrl-*"):
        match = NAME.match(path.name)
        if match is None or (match["run"] == run and match["pid"] == me):
            continue
        if match["run"] == run or not _exists(int(match["pid"])):
            with contextlib.suppress(FileNotFoundError, PermissionError):  # swept by another meanwhile, or another user's
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
