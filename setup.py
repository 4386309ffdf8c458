"""The CPU kernels, an optional extension: without a compiler the package installs all the same."""

from glob import glob

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "equipoise.kernels._kernels",
            sources=sorted(glob("src/equipoise/kernels/c/*.c")),
            depends=["src/equipoise/kernels/c/kernels.h"],
            extra_compile_args=["-std=gnu11", "-O3", "-fopenmp", "-fPIC", "-Wno-psabi"],
            optional=True,
        )
    ]
)
