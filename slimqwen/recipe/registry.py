"""The stages that a recipe can name."""

from collections.abc import Mapping
from types import MappingProxyType

from slimqwen.recipe import (
    bake_cache,
    calibrate,
    prune_vocab,
    quantise_lm_head,
    redistill_mtp,
    sample_outputs,
)
from slimqwen.recipe.stage import Stage

STAGES: Mapping[str, Stage] = MappingProxyType(
    {
        stage.name: stage
        for stage in (
            calibrate.STAGE,
            prune_vocab.STAGE,
            quantise_lm_head.STAGE,
            sample_outputs.STAGE,
            redistill_mtp.STAGE,
            bake_cache.STAGE,
        )
    }
)
