"""Builds csrc/ into one shared library, reached by ctypes: no torch headers, no Python API, one wheel a platform.

A machine without a compiler gets a package without the library, and one line that says so. With
STATETAP_REQUIRE_CPP=1 that is an error.
"""

import os
import platform
import sys
from glob import glob

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

LIBRARY = "statetap.ops.libstatetap"
KERNELS = "csrc/delta.cpp"
HEADERS = sorted(glob("csrc/*.h"))
LEVELS = {
    "baseline": [],
    "avx2": ["-mavx2", "-mfma"],
    "avx512": ["-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"],
}
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
            ext.extra_objects = self.kernels(ext.extra_compile_args)
            super().build_extension(ext)
        except Exception as error:
            if REQUIRED:
                raise
            print(f"statetap: C++ kernels not built ({error}); the torch backend serves the CPU", file=sys.stderr)

    def kernels(self, flags: list) -> list:
        """The objects of the kernels' source for every instruction set; `abi.cpp` chooses one at run time."""
        x86 = platform.machine().lower() in ("x86_64", "amd64", "i686") and "arm64" not in os.environ.get(
            "ARCHFLAGS", ""
        )
        objects: list = []
        for level in LEVELS if x86 else ["baseline"]:
            objects += self.compiler.compile(
                [KERNELS], os.path.join(self.build_temp, level), extra_postargs=flags + LEVELS[level], depends=HEADERS
            )
        return objects


class PlatformWheel(bdist_wheel):
    """py3-none-<platform>: the library does not depend on the Python that loads it."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple:
        return "py3", "none", super().get_tag()[2]


# Products are fused only where the source says so: the same step gives the same bits wherever it is taken.
flags = ["-std=c++17", "-O3", "-ffp-contract=off", "-g0", "-fvisibility=hidden", "-pthread", "-Wno-psabi"]
if sys.platform == "win32":
    flags = ["/std:c++17", "/O2"]  # MSVC has no vector types: the kernels are not built there
setup(
    ext_modules=[
        Extension(
            LIBRARY,
            sources=sorted(set(glob("csrc/*.cpp")) - {KERNELS}),
            depends=[*HEADERS, KERNELS],
            extra_compile_args=flags,
            extra_link_args=[] if sys.platform == "win32" else ["-pthread"],
            language="c++",
            optional=not REQUIRED,  # setuptools drops an optional one's error, however it is raised
        )
    ],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": PlatformWheel},
)
