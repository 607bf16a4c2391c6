"""A process that imports this can import the package no longer, as where it is not installed."""

import importlib.abc
import sys


class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triptych":
            raise ModuleNotFoundError(f"{name} is not installed")


sys.meta_path.insert(0, Blocked())
