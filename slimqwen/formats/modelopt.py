"""NVIDIA's ModelOpt: NVFP4 and FP8 with one scale for a weight."""

from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any

from slimqwen.formats.eight_bits import EightBits
from slimqwen.formats.format import Format, Layout, is_named
from slimqwen.formats.nvfp4 import Nvfp4

FILE = "hf_quant_config.json"
"""File of a checkpoint by ModelOpt before 0.31, which vLLM reads where config.json has no quantization_config."""

_LAYOUTS: Mapping[str, Layout] = {"NVFP4": Nvfp4(), "W4A16_NVFP4": Nvfp4(), "FP8": EightBits()}


class ModelOpt(Format):
    """quant_method modelopt (vllm/model_executor/layers/quantization/modelopt.py)."""

    methods = ("modelopt", "modelopt_fp4")
    layouts = (Nvfp4, EightBits)

    @property
    def _algorithm(self) -> str:
        return str(self.settings.get("quant_algo") or "NVFP4").upper()

    def describe(self) -> str:
        """The quantisation method and its algorithm, in words."""
        return f"{self.method} {self._algorithm}"

    def packs(self, module: str) -> bool:
        """Whether a module is quantised: all but embeddings and those that `ignore` or `exclude_modules` match."""
        left = self.settings.get("ignore") or self.settings.get("exclude_modules") or ()
        is_left = is_named(module, left) or any(fnmatch(module, entry) for entry in left)
        return not module.endswith("embed_tokens") and not is_left

    def layouts_of(self, module: str) -> list[Layout]:
        """The layout of the algorithm; empty if it is unknown."""
        return [_LAYOUTS[self._algorithm]] if self._algorithm in _LAYOUTS else []


def read_settings(content: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the content of ModelOpt's own settings file, hf_quant_config.json, to a quantization_config."""
    form = content.get("quantization") or {}
    has_small_cache = form.get("kv_cache_quant_algo") == "FP8"
    return {
        "quant_method": "modelopt",
        "quant_algo": form.get("quant_algo"),
        "group_size": form.get("group_size"),
        "ignore": form.get("exclude_modules") or [],
        "kv_cache_scheme": {"num_bits": 8, "type": "float"} if has_small_cache else None,
    }
