"""vLLM in this process: what an engine is given, and what it refuses to load is one line."""

import os
import platform
import shutil
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from slimqwen import host
from slimqwen.models.language_model import load_language_model
from slimqwen.serving import in_process
from slimqwen.serving.errors import ServingError
from slimqwen.serving.in_process import engine, read_head_inputs, served_arguments, try_out
from tests.zoo.published_forms import PUBLISHED_FORMS

TINY = Path(__file__).parents[2] / "weights" / "tiny"


@pytest.mark.skipif(
    "glibc" not in platform.libc_ver(), reason="another C library frees memory in its own way"
)
def test_freed_memory_goes_back_to_the_machine() -> None:
    process = psutil.Process()
    blocks = [bytearray(b"x") * 60_000 for _ in range(4000)]
    kept = blocks[::400]  # they keep the heap from shrinking at its end
    full = process.memory_info().rss
    del blocks
    in_process.return_freed_memory()
    assert process.memory_info().rss < full - 150_000_000
    assert len(kept) == 10


def test_variables_of_a_block_are_put_back_though_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "before")
    monkeypatch.delenv("NEW", raising=False)
    seen = []
    with suppress(KeyError), in_process.environment({"KEPT": "in the block", "NEW": "too"}):
        seen += [os.environ["KEPT"], os.environ["NEW"]]
        raise KeyError
    assert seen == ["in the block", "too"]
    assert (os.environ["KEPT"], os.environ.get("NEW")) == ("before", None)


@pytest.mark.parametrize(("kind", "space", "cache_bytes"), [
    ("cpu", "1.5", 3 << 29), ("cpu", None, None), ("cuda", "1.5", None),
])  # fmt: skip
def test_an_engine_has_a_server_s_flags_and_on_a_cpu_the_size_of_its_cache(
    monkeypatch: pytest.MonkeyPatch, kind: str, space: str | None, cache_bytes: int | None
) -> None:
    given: dict[str, object] = {}
    monkeypatch.setattr(in_process, "engine", lambda weights, **arguments: given.update(arguments))
    monkeypatch.setattr(host, "detect", lambda: kind)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    if space:
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", space)
    flags = {"max-num-seqs": 3, "max-model-len": 64, "port": 8080}
    in_process.served_engine(TINY, flags, max_num_seqs=4)
    assert (given["max_num_seqs"], given["max_model_len"]) == (4, 64)
    assert given.get("kv_cache_memory_bytes") == cache_bytes
    assert "port" not in given


@pytest.mark.engine
def test_of_a_multimodal_checkpoint_the_language_model_is_loaded_alone(tmp_path: Path) -> None:
    """It has no preprocessor files, without which vLLM does not load a vision tower."""
    try_out(PUBLISHED_FORMS["multimodal-bare"].build(tmp_path / "published"))


@pytest.mark.engine
def test_the_inputs_of_the_output_head_are_the_hidden_states_of_every_token_once() -> None:
    prompts, seen = [[5, 60, 700, 8], [9, 10, 11]], []
    with engine(TINY, max_num_seqs=2) as llm:
        read_head_inputs(llm, prompts, lambda states: seen.append(states.float().clone()))
        llm.generate([{"prompt_token_ids": [1, 2]}], use_tqdm=False)  # no longer watched
    found = torch.cat(seen)
    with torch.no_grad():
        model = load_language_model(TINY).model
        expected = torch.cat([model(torch.tensor([ids])).last_hidden_state[0] for ids in prompts])
    assert found.shape == expected.shape
    products = [each.T @ each for each in (found, expected)]
    assert float((products[0] - products[1]).norm() / products[1].norm()) < 0.02


def test_an_engine_with_a_server_s_flags_loads_what_the_server_loads() -> None:
    assert served_arguments({"language-model-only": True})["language_model_only"] is True
    assert served_arguments({})["language_model_only"] is False


@pytest.mark.engine
def test_a_checkpoint_with_a_tensor_of_another_shape_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    shutil.copytree(TINY, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["mtp.fc.weight"] = tensors["mtp.fc.weight"][:, :100].contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ServingError, match="vLLM does not serve it"):
        try_out(folder)
