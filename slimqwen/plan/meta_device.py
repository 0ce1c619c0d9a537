"""A CUDA device without memory: tensors on one are made on torch's meta device, and say that they are on a GPU.

A meta tensor has shape, strides and dtype, and no content. What code reads of its content is zero.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any


@contextlib.contextmanager
def on_meta_device() -> Iterator[None]:
    """Put every tensor that is made on the meta device, also where the code names a CUDA device."""
    import torch

    with torch.device("meta"), meta_for_cuda():
        yield


@contextlib.contextmanager
def meta_for_cuda() -> Iterator[None]:
    """Put every tensor on the meta device that the code puts on a CUDA device; others stay on the CPU, with content."""
    with _function_mode():
        yield


@contextlib.contextmanager
def operators(reached: "Counter[str]", results: Mapping[str, Callable[[], Any]]) -> Iterator[None]:
    """Run the Python of vLLM's own operators on meta tensors, instead of the stand-ins that only give their shapes.

    Other operators give shapes by the rule that they are registered with, or by `results`.

    Args:
        reached: counts the other operators that were reached, by name.
        results: makes the result of an operator that is registered without a rule.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)

    class PythonOperators(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(
            self, operator: Any, kinds: Any, arguments: Any = (), keywords: Any = None
        ) -> Any:
            keywords = keywords or {}
            if operator.namespace in ("aten", "prim", "prims", "profiler"):
                return operator(*arguments, **keywords)
            if operator.namespace == "vllm" and torch._C._dispatch_has_kernel_for_dispatch_key(
                operator.name(), "CUDA"
            ):
                with self, _function_mode():
                    return operator.redispatch(cuda, *arguments, **keywords)
            name = operator.name()
            reached[name] += 1
            if name in results:
                return results[name]()
            return operator(*arguments, **keywords) if operator._schema.returns else None

    with PythonOperators():
        yield


def _function_mode() -> Any:
    import torch
    from torch.overrides import TorchFunctionMode

    meta, gpu = torch.device("meta"), torch.device("cuda:0")
    is_cuda_of, device_of = torch.Tensor.is_cuda.__get__, torch.Tensor.device.__get__
    reads = ("cpu", "item", "numpy", "tolist", "__bool__", "__float__", "__index__", "__int__")
    readers = tuple(getattr(torch.Tensor, name) for name in reads)

    def is_cuda(device: Any) -> bool:
        # vLLM names a CUDA device by its index, too.
        is_device = isinstance(device, int | str | torch.device) and not isinstance(device, bool)
        return is_device and torch.device(device).type == "cuda"

    def zeros_like(tensor: Any) -> Any:
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")

    class MetaForCuda(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self, function: Any, kinds: Any, arguments: Any = (), keywords: Any = None
        ) -> Any:
            keywords = dict(keywords or {})
            keywords.pop("pin_memory", None)  # takes a driver
            if is_cuda(keywords.get("device")):
                keywords["device"] = meta
            if function == torch.Tensor.copy_ and arguments[1].is_meta and not arguments[0].is_meta:
                return arguments[0].expand(torch.broadcast_shapes(arguments[0].shape, arguments[1].shape))
            if function == torch.Tensor.pin_memory:
                return arguments[0]
            if function == torch.Tensor.cuda:
                return arguments[0].to(meta)
            if function == torch.Tensor.to:
                arguments = (arguments[0], *(meta if is_cuda(word) else word for word in arguments[1:]))
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
