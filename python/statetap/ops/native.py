"""The C++ library, loaded once with ctypes and only if its ABI is the one this package was written for."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import lru_cache
from pathlib import Path

ABI_VERSION = 2

_SUFFIX = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
_OWN = Path(__file__).with_name("libstatetap" + _SUFFIX)
PATH = Path(os.environ.get("STATETAP_LIBRARY") or _OWN)  # the variable: an instrumented build, under test
LEVELS = ("avx512", "avx2", "neon", "baseline")

_ERRORS = {1: MemoryError}


@lru_cache(maxsize=1)
def load() -> ctypes.CDLL | str:
    """The library, or in one line why there is none."""
    if not PATH.exists():
        return f"{PATH.name} is not in {PATH.parent}: {_never_built()}"
    try:
        library = ctypes.CDLL(str(PATH))
        library.statetap_abi_version.restype = ctypes.c_int32
        version = library.statetap_abi_version()
    except (OSError, AttributeError) as error:
        return f"{PATH.name} does not load: {error}"
    if version != ABI_VERSION:
        return f"{PATH.name} has ABI version {version}, this package needs {ABI_VERSION}: reinstall statetap"
    for name in ("statetap_instruction_set", "statetap_compiler"):
        getattr(library, name).restype = ctypes.c_char_p
    forced, found = os.environ.get("STATETAP_INSTRUCTION_SET"), library.statetap_instruction_set().decode()
    if forced and forced not in LEVELS:
        return f"STATETAP_INSTRUCTION_SET: got {forced!r}, needs one of {', '.join(LEVELS)}"
    if forced and forced != found:
        return f"STATETAP_INSTRUCTION_SET: got {forced!r}, and this machine or build has {found} at most"
    library.statetap_gated_delta_rule.argtypes = (ctypes.c_char_p,)
    library.statetap_gated_delta_rule.restype = ctypes.c_int32
    library.statetap_huge_pages.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    library.statetap_huge_pages.restype = None
    return library


def _never_built() -> str:
    """Why a library is missing: a source tree has a setup.py to build it with, an installed package has not."""
    if (PATH.parents[3] / "setup.py").exists() and (PATH.parents[3] / "csrc").exists():
        return f"not built; run `python setup.py build_ext --inplace` in {PATH.parents[3]}"
    return "the package was built without a C++ compiler; reinstall with one"


def gated_delta_rule(packed: bytes) -> None:
    """Run a packed `statetap_delta`. The interpreter's lock is released meanwhile."""
    error = load().statetap_gated_delta_rule(packed)  # type: ignore[union-attr]
    if error:
        raise _ERRORS.get(error, RuntimeError)(f"the C++ kernel gave error {error}")


def huge_pages(address: int, size: int) -> None:
    """Ask for huge pages under memory that is about to be written for the first time."""
    load().statetap_huge_pages(address, size)  # type: ignore[union-attr]


def why_not() -> str | None:
    """None if the library is there, else the reason."""
    library = load()
    return library if isinstance(library, str) else None


def instruction_set() -> str | None:
    """The instruction set chosen on this machine: "avx512", "avx2", "neon", "baseline"; None without the library."""
    library = load()
    return None if isinstance(library, str) else library.statetap_instruction_set().decode()


def compiler() -> str | None:
    """The compiler that built the library; None without it."""
    library = load()
    return None if isinstance(library, str) else library.statetap_compiler().decode()
