"""The CPU kernels, an optional extension: without a compiler the package installs all the same."""

from glob import glob

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "equipoise.sparse._kernels",
            sources=sorted(glob("src/equipoise/sparse/c/*.c")),
            depends=["src/equipoise/sparse/c/kernels.h"],
            extra_compile_args=["-std=gnu11", "-O3", "-fopenmp", "-fPIC", "-Wno-psabi"],
            optional=True,
        )
    ]
)
