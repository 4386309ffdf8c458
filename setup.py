"""Build the CPU kernels as an optional extension: without a compiler the package installs without them."""

from glob import glob
from runpy import run_path

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "equipoise.kernels._kernels",
            sources=sorted(glob("src/equipoise/kernels/c/*.c")),
            depends=["src/equipoise/kernels/c/kernels.h"],
            extra_compile_args=list(run_path("src/equipoise/kernels/build.py")["FLAGS"]),
            optional=True,
        )
    ]
)
