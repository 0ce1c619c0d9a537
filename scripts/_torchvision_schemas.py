"""Define two operator schemas before torchvision needs them; `scripts/install.py` says why and until when."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType


class SchemasFirst(importlib.abc.MetaPathFinder):
    """Import hook that finds no module itself, but acts once, at the first import of torchvision."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Define torchvision::nms and ::qnms, then let the next finder find the package."""
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in ("nms", "qnms"):
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _kept_alive.append(library)  # the schemas exist as long as the library object
        return None


_kept_alive: list[object] = []
sys.meta_path.insert(0, SchemasFirst())
