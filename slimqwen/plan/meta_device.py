"""A CUDA device without memory: its tensors are on torch's meta device and report that they are on a GPU.

A meta tensor has shape, strides and dtype, but no content; code that reads its content gets zeros.
"""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any


@contextlib.contextmanager
def on_meta_device() -> Iterator[None]:
    """Create every tensor on the meta device, even where the code names a CUDA device."""
    import torch

    with torch.device("meta"), meta_for_cuda():
        yield


def meta_for_cuda() -> AbstractContextManager[Any]:
    """Create tensors of CUDA devices on the meta device; all others are on the CPU, with content."""
    import torch
    from torch.overrides import TorchFunctionMode

    meta, gpu = torch.device("meta"), torch.device("cuda:0")
    is_cuda_of, device_of = torch.Tensor.is_cuda.__get__, torch.Tensor.device.__get__
    reader_names = ("cpu", "item", "numpy", "tolist", "__bool__", "__float__", "__index__", "__int__")
    readers = tuple(getattr(torch.Tensor, name) for name in reader_names)

    def is_cuda(device: Any) -> bool:
        # vLLM also gives a CUDA device by its index.
        is_device = isinstance(device, int | str | torch.device) and not isinstance(device, bool)
        return is_device and torch.device(device).type == "cuda"

    def zeros_like(tensor: Any) -> Any:
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")

    class MetaForCuda(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
        ) -> Any:
            keywords = dict(keywords or {})
            keywords.pop("pin_memory", None)  # pinning memory needs a driver
            if is_cuda(keywords.get("device")):
                keywords["device"] = meta
            if function == torch.Tensor.copy_ and arguments[1].is_meta and not arguments[0].is_meta:
                return arguments[0].expand(torch.broadcast_shapes(arguments[0].shape, arguments[1].shape))
            if function == torch.Tensor.pin_memory:
                return arguments[0]
            if function == torch.Tensor.cuda:
                return arguments[0].to(meta)
            if function == torch.Tensor.to:
                arguments = (
                    arguments[0],
                    *(meta if is_cuda(argument) else argument for argument in arguments[1:]),
                )
            if arguments and isinstance(arguments[0], torch.Tensor) and arguments[0].is_meta:
                tensor, *rest = arguments
                if function == is_cuda_of:
                    return True
                if function == device_of:
                    return gpu
                if function in readers:
                    return function(zeros_like(tensor), *rest, **keywords)
                if function == torch.Tensor.to and "cpu" in map(str, (*rest, keywords.get("device"))):
                    return function(zeros_like(tensor), *rest, **keywords)
            return function(*arguments, **keywords)

    return MetaForCuda()
