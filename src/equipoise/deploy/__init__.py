"""Deployment: write trained networks to small files, and run them with the sparse kernels."""

from equipoise.deploy.blueprint import Blueprint, Network
from equipoise.deploy.custom import save
from equipoise.deploy.loading import load
from equipoise.deploy.packed_file import read_packed, write_packed
from equipoise.deploy.two_to_four import semi_structured

__all__ = ["Blueprint", "Network", "load", "read_packed", "save", "semi_structured", "write_packed"]
