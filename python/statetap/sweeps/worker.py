"""One process that works on a run: who it is, whether it is still there, and which of its machine's it is."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Mapping

_LOCAL = ("LOCAL_RANK", "SLURM_LOCALID")


@dataclass(frozen=True)
class Worker:
    """A process.

    Attributes:
        host: the machine, and which of its boots where it says so.
        pid: its number there.
        started: when, in the machine's own count, so that a number that is used again is not taken for it.
    """

    host: str
    pid: int
    started: int

    def is_alive(self) -> bool | None:
        """Whether it is; None if it is on another machine."""
        if self.host != _host():
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except OSError:
            pass  # somebody else's: it is there
        return _started(self.pid) == self.started

    @property
    def tag(self) -> str:
        """For names of files; see `of_tag`."""
        return f"{self.host}~{self.pid}~{self.started}"


def of_tag(tag: str) -> Worker | None:
    """The worker of a `tag`; None if it is none."""
    found = re.fullmatch(r"([\w-]*)~(\d+)~(-?\d+)", tag)
    return None if found is None else Worker(found[1], int(found[2]), int(found[3]))


def me() -> Worker:
    """This process."""
    pid = os.getpid()
    return Worker(_host(), pid, _started(pid))


@lru_cache(1)
def _host() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    except OSError:
        boot = ""
    return re.sub(r"[^\w-]", "_", f"{platform.node()}-{boot}")


def _started(pid: int) -> int:
    """When a process started, in ticks since the boot; -1 for one that has ended, 0 where there is no such count."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0 if not Path("/proc/self/stat").exists() else -1
    return -1 if fields[0] in "ZX" else int(fields[19])


def local_rank(environment: Mapping[str, str]) -> int | None:
    """Which of this machine's workers this is, as a launcher says; None without one."""
    said = next((environment[name] for name in _LOCAL if environment.get(name, "").isdigit()), None)
    return None if said is None else int(said)
