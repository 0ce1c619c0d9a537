"""Whether a model fits on a GPU and how fast it could be there, by arithmetic alone: no weights, CUDA or vLLM.

    subject.py       what MODEL names: a variant, a folder, a config.json, a committed shape, a repository of the hub
    optimised.py     the same checkpoint after each optimisation that the project offers, as tensors without content
    architecture.py  bytes and FLOPs of a checkpoint's parts, and the blocks of its cache
    cost.py          the shortest time of a step: the roofline
    memory.py        weights, cache and activations of a server on one GPU, and its speed
    verdict.py       whether it fits, and which recipe, load or number of GPUs would make it fit
    waterfall.py     the bytes and the time of a step after each stage of a variant's recipe
    step_bytes.py    what packing draft head and embedding saves the variants that are to be served
    tables.py        the steps on one GPU, the notes, the tables over GPUs

`slimqwen plan` refines the result with vLLM's own code where the CUDA environment is installed; bytes and blocks agree.
"""

from slimqwen.errors import SlimqwenError


class FitError(SlimqwenError):
    """Nothing can be computed for a checkpoint, setting or figure, or a model does not fit on a GPU."""
