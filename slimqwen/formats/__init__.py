"""Quantisation formats: one class a format. A new format is a module and a row of `FORMATS`."""

import re
from collections.abc import Mapping
from typing import Any

from slimqwen.formats.compressed_tensors import CompressedTensors
from slimqwen.formats.format import Format, Unquantised
from slimqwen.formats.fp8 import Fp8
from slimqwen.formats.gptq import AutoRound, Awq, Gptq
from slimqwen.formats.modelopt import ModelOpt

FORMATS: tuple[type[Format], ...] = (Unquantised, CompressedTensors, Fp8, Gptq, AutoRound, Awq, ModelOpt)

_LAYOUTS = [layout for format_ in FORMATS for layout in format_.layouts]

CARRIERS = tuple(dict.fromkeys(["weight", *(layout.carrier for layout in _LAYOUTS)]))
"""The parts that may hold the numbers of a weight; a module has one of them."""

BY_ROW = frozenset(part for layout in _LAYOUTS for part in layout.by_row)
"""The parts that may have a row for each row of the weight."""

BY_WEIGHT = frozenset(part for layout in _LAYOUTS for part in layout.by_weight)
"""The parts that belong to all rows together."""

_PARTS = {part for layout in _LAYOUTS for part in (*layout.required, *layout.optional, *layout.further)}
PART = re.compile(rf"(?P<module>.+)\.(?P<part>{'|'.join(sorted({*CARRIERS, *_PARTS}))})")
"""Name of a tensor that is a part of a weight in any format."""


def find_format(settings: Mapping[str, Any]) -> Format:
    """The format of a quantization_config; an empty one is `Unquantised`, an unknown one the base class `Format`."""
    method = str(settings.get("quant_method", "")).lower()
    known = next((kind for kind in FORMATS if method in kind.methods), Format)
    return known(settings)
