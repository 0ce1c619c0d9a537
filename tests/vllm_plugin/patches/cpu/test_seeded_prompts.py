from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slimqwen.serving.in_process import engine
from slimqwen.vllm_plugin.patches.cpu import seeded_prompts

SEEDS = range(4)
PROMPT_TOKENS = 300
TOKEN_BUDGETS = (256, 512)
"""Of a step: the prompt takes two steps of the one, and one of the other."""

FLATNESS = 64


@pytest.mark.usefixtures("stock_vllm")
def test_the_fix_is_still_needed():
    """Fails when a CPU's generator has an offset: the fix can go then."""
    with pytest.raises(RuntimeError, match="does not use offset"):
        torch.Generator().get_offset()


@pytest.mark.usefixtures("stock_vllm")
@pytest.mark.parametrize("fails", [False, True])
def test_generators_are_out_of_reach_only_in_steps_whose_token_is_thrown_away(monkeypatch, fails):
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    seen = []

    def sample_tokens(self, grammar_output):
        seen.append(dict(self.input_batch.generators))
        if fails:
            raise ValueError("sampling failed")
        return grammar_output

    monkeypatch.setattr(GPUModelRunner, "sample_tokens", sample_tokens)
    assert seeded_prompts.install()
    assert not seeded_prompts.install()
    runner = SimpleNamespace(
        # The last row is left over from a larger batch.
        input_batch=SimpleNamespace(num_reqs=3, generators={0: "first", 2: "third"}),
        discard_request_mask=SimpleNamespace(np=np.array([True, True, False, True])),
    )
    if fails:
        with pytest.raises(ValueError, match="sampling failed"):
            GPUModelRunner.sample_tokens(runner, "grammar")
    else:
        assert GPUModelRunner.sample_tokens(runner, "grammar") == "grammar"
    assert seen == [{2: "third"}]
    assert runner.input_batch.generators == {0: "first", 2: "third"}


@pytest.fixture(scope="module")
def flat(tiny, tmp_path_factory):
    """The tiny model with its logits divided, so that what a request draws follows from its generator alone.

    The rounding errors of one step or of two would else decide some tokens.
    """
    folder = tmp_path_factory.mktemp("flat")
    tensors = load_file(tiny / "model.safetensors")
    tensors["model.norm.weight"] = (1 + tensors["model.norm.weight"]) / FLATNESS - 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for file in tiny.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).symlink_to(file)
    return folder


@pytest.mark.engine
def test_a_seed_gives_the_same_tokens_whatever_one_step_holds(flat, texts):
    from vllm import SamplingParams

    ids = [token for text in texts for token in text]
    prompt = (ids * -(-PROMPT_TOKENS // len(ids)))[:PROMPT_TOKENS]
    settings = [SamplingParams(seed=seed, max_tokens=8, ignore_eos=True) for seed in SEEDS]
    # Beside requests without a seed, which draw from the engine's generator.
    settings += [SamplingParams(max_tokens=8, ignore_eos=True)] * 2
    prompts = [{"prompt_token_ids": prompt[number:]} for number in range(len(settings))]
    drawn = {}
    for budget in TOKEN_BUDGETS:
        with engine(flat, num_speculative_tokens=4, max_num_batched_tokens=budget, max_model_len=512) as llm:
            alone = [
                llm.generate(each, one, use_tqdm=False)[0].outputs[0].token_ids
                for each, one in zip(prompts[:2], settings[:2], strict=True)
            ]
            together = [each.outputs[0].token_ids for each in llm.generate(prompts, settings, use_tqdm=False)]
            assert alone == together[:2]
            drawn[budget] = together[: len(SEEDS)]
    in_two_steps, in_one = drawn.values()
    assert in_two_steps == in_one
    assert len({tuple(tokens) for tokens in in_one}) == len(SEEDS)
