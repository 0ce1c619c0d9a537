"""Tensors of a GPU without memory: where they are, and what is read of them."""

import numpy as np
import pytest
import torch

from slimqwen.plan.meta_device import meta_for_cuda, on_meta_device


def test_a_tensor_on_a_gpu_says_so_and_has_no_content():
    with meta_for_cuda():
        tensor = torch.empty((1 << 20, 1 << 20), device="cuda")
        assert tensor.is_cuda
        assert tensor.device == torch.device("cuda:0")
        assert torch.empty_like(tensor, device=tensor.device).is_meta
    assert tensor.is_meta


def test_a_tensor_that_names_no_device_keeps_its_content():
    with meta_for_cuda():
        tensor = torch.ones(2, pin_memory=True)
        assert tensor.device.type == "cpu"
        assert tensor.pin_memory().tolist() == [1.0, 1.0]
        assert tensor.to("cuda").is_cuda
        assert tensor.cuda().is_cuda
    with on_meta_device():
        assert torch.ones(2).is_meta


@pytest.mark.parametrize(
    ("read", "value"),
    [
        (lambda tensor: tensor.tolist(), [0, 0]),
        (lambda tensor: tensor[0].item(), 0),
        (lambda tensor: bool(tensor.any()), False),
        (lambda tensor: tensor.cpu().tolist(), [0, 0]),
        (lambda tensor: tensor.to("cpu").tolist(), [0, 0]),
        (lambda tensor: np.asarray(tensor.cpu().numpy()).sum(), 0),
    ],
)
def test_what_is_read_of_a_gpu_is_zero(read, value):
    with meta_for_cuda():
        assert read(torch.ones(2, dtype=torch.int64, device="cuda")) == value


def test_a_copy_has_to_fit():
    with meta_for_cuda():
        target = torch.zeros(2)
        target.copy_(torch.ones(2, device="cuda"))
        with pytest.raises(RuntimeError, match="shape"):
            target.copy_(torch.ones(3, device="cuda"))
