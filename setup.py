"""Builds csrc/ into one shared library, reached by ctypes: no torch headers, no Python API, one wheel a platform.

A machine without a compiler gets a package without the library, and one line that says so. With
STATETAP_REQUIRE_CPP=1 that is an error.
"""

import os
import sys
from glob import glob

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

LIBRARY = "statetap.ops.libstatetap"
REQUIRED = os.environ.get("STATETAP_REQUIRE_CPP") == "1"


class BuildLibrary(build_ext):
    """A plain shared library under a name of its own, optional unless it is required."""

    def get_ext_filename(self, fullname: str) -> str:
        suffix = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
        return os.path.join(*fullname.split(".")) + suffix

    def get_export_symbols(self, ext: Extension) -> list:
        return []  # not a Python module: no PyInit_

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except Exception as error:
            if REQUIRED:
                raise
            print(f"statetap: C++ kernels not built ({error}); the torch backend serves the CPU", file=sys.stderr)


class PlatformWheel(bdist_wheel):
    """py3-none-<platform>: the library does not depend on the Python that loads it."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple:
        return "py3", "none", super().get_tag()[2]


flags = ["/std:c++17", "/O2"] if sys.platform == "win32" else ["-std=c++17", "-O3", "-fvisibility=hidden"]
setup(
    ext_modules=[
        Extension(
            LIBRARY,
            sources=sorted(glob("csrc/*.cpp")),
            depends=sorted(glob("csrc/*.h")),
            extra_compile_args=flags,
            language="c++",
            optional=not REQUIRED,  # setuptools drops an optional one's error, however it is raised
        )
    ],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": PlatformWheel},
)
