"""The C++ library, loaded once with ctypes and only if its ABI is the one this package was written for."""

from __future__ import annotations

import ctypes
import sys
from functools import lru_cache
from pathlib import Path

ABI_VERSION = 1

_SUFFIX = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
PATH = Path(__file__).with_name("libstatetap" + _SUFFIX)


@lru_cache(maxsize=1)
def load() -> ctypes.CDLL | str:
    """The library, or in one line why there is none."""
    if not PATH.exists():
        return f"{PATH.name} is not in {PATH.parent}: the package was built without a C++ compiler; reinstall with one"
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
    return library


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
