"""Deployment: write trained networks to small files, and run them with the sparse kernels."""

from equipoise.deploy.blueprint import Blueprint, Network
from equipoise.deploy.custom import save
from equipoise.deploy.loading import load
from equipoise.deploy.packed_file import read_packed, write_packed

__all__ = ["Blueprint", "Network", "load", "read_packed", "save", "write_packed"]
