"""The head that is found, its spectrum against known ones, rounding and scores against direct computations."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from slimqwen import checkpoint
from slimqwen.evaluation import lm_head
from slimqwen.evaluation.lm_head import HeadError
from slimqwen.evaluation.rounding import rounded
from slimqwen.recipe.quantise_lm_head import round_groups
from slimqwen.report import plots
from slimqwen.tinyworld.model import TinyShape, build, write_checkpoint
from tests.byte_tokenizer import byte_tokenizer

ROWS, HIDDEN = 320, 64
SHAPE = TinyShape(
    vocab_size=ROWS,
    hidden_size=HIDDEN,
    intermediate_size=128,
    head_dim=32,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
)
TEXTS = ["The ferry came late.", "Nula keeps a fox, and the fox keeps Nula.", "Grün ist die Flagge."]


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen3.5 of the real form with a token a byte."""
    folder = tmp_path_factory.mktemp("weights") / "tied"
    write_checkpoint(build(SHAPE, seed=0), byte_tokenizer(), folder)
    return folder


@pytest.fixture(scope="session")
def untied(tied: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a head of its own, large enough that its predictions are sharp."""
    folder = tmp_path_factory.mktemp("weights") / "untied"
    folder.mkdir()
    checkpoint.carry_side_files(tied, folder)
    checkpoint.write_config(folder, {**checkpoint.read_config(tied), "tie_word_embeddings": False})
    weight = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(3)).bfloat16() / 4
    tensors = load_file(tied / "model.safetensors")
    save_file({**tensors, "lm_head.weight": weight}, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture
def with_head(tmp_path: Path, tied: Path) -> Callable[[torch.Tensor], lm_head.Head]:
    def write(weight: torch.Tensor) -> lm_head.Head:
        folder = tmp_path / "by-hand"
        folder.mkdir(exist_ok=True)
        checkpoint.write_config(folder, checkpoint.read_config(tied))
        save_file({"lm_head.weight": weight}, folder / "model.safetensors")
        return lm_head.find(folder)

    return write


def whole(head: lm_head.Head) -> torch.Tensor:
    return torch.cat([block for _, block in head.blocks()])


def test_a_known_low_rank_matrix_has_its_rank_and_energies(
    with_head: Callable[[torch.Tensor], lm_head.Head],
):
    # Orthonormal columns times 8, 4, 2, 1: squares 64, 16, 4, 1 of 85.
    left = torch.linalg.qr(torch.randn(200, 4, generator=torch.Generator().manual_seed(0)).double())[0]
    right = torch.linalg.qr(torch.randn(32, 4, generator=torch.Generator().manual_seed(1)).double())[0]
    weight = left @ torch.diag(torch.tensor([8.0, 4.0, 2.0, 1.0]).double()) @ right.T
    found = lm_head.spectrum(with_head(weight.float()))
    assert found.singular_values[:4].tolist() == pytest.approx([8, 4, 2, 1], rel=1e-6)
    assert found.singular_values[4:].max() < 1e-5
    assert [found.rank(energy) for energy in (0.5, 0.9, 0.95, 0.98, 0.99)] == [1, 2, 3, 3, 4]
    assert found.energy(2) == pytest.approx(80 / 85, rel=1e-6)
    assert found.relative_error(2) == pytest.approx(math.sqrt(5 / 85), rel=1e-6)


def test_the_streamed_spectrum_is_that_of_the_whole_matrix(
    with_head: Callable[[torch.Tensor], lm_head.Head], monkeypatch: pytest.MonkeyPatch
):
    weight = torch.randn(301, 48, generator=torch.Generator().manual_seed(0)).bfloat16()
    monkeypatch.setattr(lm_head, "_BLOCK", 48 * 17)
    head = with_head(weight)
    assert len(list(head.blocks())) == 18
    assert torch.equal(whole(head), weight.float())
    found = lm_head.spectrum(head)
    _, values, vectors = torch.linalg.svd(weight.double(), full_matrices=False)
    torch.testing.assert_close(found.singular_values, values)
    torch.testing.assert_close((found.vectors * vectors.T).sum(0).abs(), torch.ones(48).double())


def test_tied_and_untied_heads_are_told_apart(tied: Path, untied: Path, tmp_path: Path):
    first, second = lm_head.find(tied), lm_head.find(untied)
    assert (first.name, first.tied, first.rows, first.hidden) == (
        "model.embed_tokens.weight",
        True,
        ROWS,
        HIDDEN,
    )
    assert (second.name, second.tied) == ("lm_head.weight", False)
    checkpoint.write_config(tmp_path, {**checkpoint.read_config(tied), "tie_word_embeddings": False})
    (tmp_path / "model.safetensors").write_bytes((tied / "model.safetensors").read_bytes())
    with pytest.raises(HeadError, match=r"has no lm_head\.weight, yet its config ties no embeddings"):
        lm_head.find(tmp_path)


def test_a_head_without_numbers_is_refused(with_head: Callable[[torch.Tensor], lm_head.Head]):
    with pytest.raises(HeadError, match="in 16 or 32 bits"):
        with_head(torch.zeros(64, 32, dtype=torch.int32))
    for bad in (torch.zeros(64, 32), torch.full((64, 32), math.nan)):
        with pytest.raises(HeadError, match="zero or not finite"):
            lm_head.spectrum(with_head(bad))


def test_rounding_is_that_of_compressed_tensors():
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    weight = torch.randn(40, 128, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    for group in (32, 64, 128):
        arguments = QuantizationArgs(num_bits=4, symmetric=True, strategy="group", group_size=group)
        groups = weight.reshape(40, -1, group)
        scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), arguments)
        theirs = fake_quantize(weight, scale.bfloat16().float(), zero, arguments)
        torch.testing.assert_close(rounded(weight, group, lm_head.BITS), theirs)
        assert (rounded(weight, group, lm_head.BITS)[3] == 0).all()


def test_rounding_is_that_of_the_stage_that_stores_it():
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    whole, scales = round_groups(weight.numpy(), 32)
    widths = torch.from_numpy(scales.view("int16")).view(torch.bfloat16).float().repeat_interleave(32, dim=1)
    assert torch.equal(rounded(weight, 32, lm_head.BITS), torch.from_numpy(whole) * widths)


@pytest.mark.parametrize("which", ["tied", "untied"])
def test_every_figure_equals_a_direct_computation(
    which: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
):
    folder: Path = request.getfixturevalue(which)
    # Several blocks of rows, in both passes.
    monkeypatch.setattr(lm_head, "_BLOCK", HIDDEN * 100)
    report = lm_head.analyse(folder, TEXTS, fractions=(0.25, 1.0))
    model = transformers.Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    weight = whole(lm_head.find(folder))
    left, values, right = torch.linalg.svd(weight.double(), full_matrices=False)

    def directly(changed: torch.Tensor) -> list[float]:
        # A head of its own, so that the input embedding stays.
        model.lm_head.weight = torch.nn.Parameter(changed.float())
        bits = []
        for text in TEXTS:
            ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
            with torch.no_grad():
                logits = model(torch.cat([torch.tensor([0]), ids])[None, :-1]).logits[0]
            nats = torch.nn.functional.cross_entropy(logits, ids, reduction="sum").item()
            bits.append(nats / math.log(2) / len(text.encode()))
        return bits

    sizes = [len(text.encode()) for text in TEXTS]

    def mean(bits: list[float]) -> float:
        return sum(bit * size for bit, size in zip(bits, sizes, strict=True)) / sum(sizes)

    before = mean(directly(weight))
    assert report["bits_per_byte"]["value"] == pytest.approx(before, rel=1e-5)
    assert report["singular_values"] == pytest.approx(values.tolist(), rel=1e-4)
    assert {16, 64, *report["ranks"].values()} == {
        row["rank"] for row in report["heads"] if row["kind"] == "low_rank"
    }
    assert [row["group"] for row in report["heads"] if row["kind"] == "rounded"] == [32, 64]
    assert report["groups_left_out"] == [128]
    for row in report["heads"]:
        if row["kind"] == "low_rank":
            rank = row["rank"]
            changed = (left[:, :rank] * values[:rank]) @ right[:rank]
            assert row["bytes"] == (ROWS + HIDDEN) * rank * 2
        else:
            changed = rounded(weight, row["group"], lm_head.BITS).double()
            assert row["bytes"] == ROWS * HIDDEN // 2 + ROWS * HIDDEN // row["group"] * 2
        error = ((changed - weight).norm() / weight.norm()).item()
        assert row["relative_error"] == pytest.approx(error, rel=1e-4, abs=1e-7)
        after = mean(directly(changed))
        assert row["bits_per_byte"]["value"] == pytest.approx(after, rel=1e-5)
        assert row["bits_per_byte_change"]["value"] == pytest.approx(after - before, abs=1e-5)
        assert row["bits_per_byte_change"]["count"] == len(TEXTS)
    full = next(row for row in report["heads"] if row.get("rank") == HIDDEN)
    assert full["bits_per_byte_change"]["value"] == pytest.approx(0, abs=1e-5)


def test_the_report_is_data_and_can_be_drawn(tied: Path, tmp_path: Path):
    report: dict[str, Any] = json.loads(json.dumps(lm_head.analyse(tied, TEXTS), allow_nan=False))
    plots.write(tmp_path / "head.svg", plots.lm_head(report))
    drawn = (tmp_path / "head.svg").read_text()
    for label in ("energy", "low rank, 16 bit", "4 bit", "bytes of the head (MB)"):
        assert label in drawn


def test_an_empty_text_is_refused(tied: Path):
    with pytest.raises(HeadError, match="is empty"):
        lm_head.analyse(tied, ["text", ""])
