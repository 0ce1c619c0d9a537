"""The training of an MTP head."""

from types import SimpleNamespace

import pytest
import torch

from slimqwen.models.mtp_head import DraftHead
from slimqwen.recipe import head_training


def test_the_divergence_over_drafted_ids_is_the_sum_over_them_by_hand() -> None:
    scores = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 3.0, 0.5, 1.0]])
    ids = torch.tensor([1, 3])
    model = SimpleNamespace(
        logits=lambda hidden: hidden,
        draft_head=DraftHead(torch.eye(4)[ids], ids),
    )
    students = scores.flip(0).clone().requires_grad_()
    found = head_training.divergence_from_target(model, students, scores, True)
    target = scores.softmax(-1)[:, ids]
    student = scores.flip(0)[:, ids].softmax(-1)
    assert found.item() == pytest.approx((target * (target / student).log()).sum().item() / 2)
