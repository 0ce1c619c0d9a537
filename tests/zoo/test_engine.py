"""vLLM computes with the same weights as this library reads, in every format that it can load."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from slimqwen.checkpoint.weights import has_mtp_head
from slimqwen.models.language_model import load_language_model
from slimqwen.serving.in_process import engine, read_prompts
from tests.checkpoints import TINY
from tests.zoo.published_forms import PUBLISHED_FORMS
from tests.zoo.verbs import FORMATS

PROSE = TINY.parents[1] / "eval" / "tasks" / "tinyworld" / "prose.jsonl"


@pytest.fixture(scope="module")
def ids() -> list[int]:
    """A text that the small model knows well, in token ids."""
    text = json.loads(PROSE.read_text().splitlines()[0])["text"]
    tokens: list[int] = AutoTokenizer.from_pretrained(TINY)(text)["input_ids"]
    return tokens[:96]


needs_amx = pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(), reason="vLLM's CPU kernels for FP8 weights in blocks need AMX"
)


@pytest.mark.engine
@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=needs_amx) if name == "fp8-blocks" else name for name in FORMATS),
        "w4a16-mtp",
    ],
)
def test_vllm_computes_with_the_weights_that_are_read_here(tmp_path: Path, ids: list[int], name: str) -> None:
    folder = PUBLISHED_FORMS[name].build(tmp_path / "published")
    served: list[torch.Tensor] = []
    drafts = 1 if has_mtp_head(folder) else 0
    with engine(folder, num_speculative_tokens=drafts, max_model_len=128, max_num_seqs=1) as llm:
        read_prompts(llm, [ids], lambda scores, targets: served.append(scores))
    with torch.no_grad():
        expected = load_language_model(folder)(torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)
    found = torch.cat(served)[: len(expected)]
    divergence = (expected.exp() * (expected - found)).sum(-1).mean()
    # 16-bit arithmetic costs a thousandth of a nat and 8-bit inputs some; a weight read in another order costs nats.
    assert float(divergence) < 0.05
