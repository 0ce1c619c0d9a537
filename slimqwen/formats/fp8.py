"""FP8 as Qwen and DeepSeek publish it: blocks of 128 x 128 with weight_scale_inv, or one scale for a weight."""

from slimqwen.formats.eight_bits import EightBits
from slimqwen.formats.format import Format


class Fp8(Format):
    """quant_method fp8 (vllm/model_executor/layers/quantization/fp8.py)."""

    methods = ("fp8",)
    layouts = (EightBits,)

    def layouts_of(self, module: str) -> list[EightBits]:
        """Scales by block if config.json has a block size, else one scale for a weight."""
        if size := self.settings.get("weight_block_size"):
            return [EightBits(block=(int(size[0]), int(size[1])), scale="weight_scale_inv")]
        return [EightBits()]
