"""Build the CPU kernels as a plain shared library, which needs neither Python nor torch to link.

One wheel therefore serves every Python. Without a compiler the package installs without the library, and compiles it
at first use.
"""

from glob import glob
from runpy import run_path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

BUILD = run_path("src/equipoise/kernels/build.py")
GLIBC = "2_28"  # of the wheel's platform; the library needs symbols of glibc 2.16


class BuildLibrary(build_ext):
    """Names the library without the tag of a Python version."""

    def get_ext_filename(self, fullname: str) -> str:
        return f"{fullname.replace('.', '/')}.so"


class Wheel(bdist_wheel):
    """Tags the wheel by what it contains: a library for one platform, or Python only."""

    def get_tag(self) -> tuple[str, str, str]:
        platform = super().get_tag()[2]
        library = f"{self.get_finalized_command('build_ext').build_lib}/equipoise/kernels/{BUILD['NAME']}"
        return "py3", "none", platform.replace("linux_", f"manylinux_{GLIBC}_", 1) if glob(library) else "any"


setup(
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": Wheel},
    ext_modules=[
        Extension(
            "equipoise.kernels._kernels",
            sources=sorted(glob("src/equipoise/kernels/c/*.c")),
            depends=sorted(glob("src/equipoise/kernels/c/*.h")),
            extra_compile_args=list(BUILD["FLAGS"]),
            optional=True,
        )
    ],
)
