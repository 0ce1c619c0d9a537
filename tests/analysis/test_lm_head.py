"""The head that is found, its spectrum against known ones, rounding and scores against direct computations."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from slimqwen import checkpoint, variant
from slimqwen.analysis.lm_head import measurement, output_head
from slimqwen.analysis.lm_head.output_head import HeadError
from slimqwen.analysis.lm_head.record import LmHead
from slimqwen.checkpoint.config import write_config
from slimqwen.checkpoint.files import carry_side_files
from slimqwen.checkpoint.rtn import round_to_nearest
from slimqwen.records import store
from slimqwen.report import charts
from slimqwen.tinyworld.model import TinyShape, build, write_checkpoint
from tests.byte_tokenizer import byte_tokenizer

COMMITTED = next((variant.repository_root() / "results").glob("lm_head_*.json"))

ROWS, HIDDEN = 320, 64
SHAPE = TinyShape(
    vocab_size=ROWS,
    hidden_size=HIDDEN,
    intermediate_size=128,
    head_dim=32,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
)
WithHead = Callable[[torch.Tensor], output_head.Head]
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
    carry_side_files(tied, folder)
    write_config(folder, {**checkpoint.read_config(tied), "tie_word_embeddings": False})
    weight = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(3)).bfloat16() / 4
    tensors = load_file(tied / "model.safetensors")
    save_file({**tensors, "lm_head.weight": weight}, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture
def with_head(tmp_path: Path, tied: Path) -> WithHead:
    def write(weight: torch.Tensor) -> output_head.Head:
        folder = tmp_path / "by-hand"
        folder.mkdir(exist_ok=True)
        write_config(folder, checkpoint.read_config(tied))
        save_file({"lm_head.weight": weight}, folder / "model.safetensors")
        return output_head.find(folder)

    return write


def whole(head: output_head.Head) -> torch.Tensor:
    return torch.cat([block for _, block in head.blocks()])


def test_a_known_low_rank_matrix_has_its_rank_and_energies(
    with_head: WithHead,
):
    # Orthonormal columns times 8, 4, 2, 1: squares 64, 16, 4, 1 of 85.
    left = torch.linalg.qr(torch.randn(200, 4, generator=torch.Generator().manual_seed(0)).double())[0]
    right = torch.linalg.qr(torch.randn(32, 4, generator=torch.Generator().manual_seed(1)).double())[0]
    weight = left @ torch.diag(torch.tensor([8.0, 4.0, 2.0, 1.0]).double()) @ right.T
    found = output_head.spectrum(with_head(weight.float()))
    assert found.singular_values[:4].tolist() == pytest.approx([8, 4, 2, 1], rel=1e-6)
    assert found.singular_values[4:].max() < 1e-5
    assert [found.rank(energy) for energy in (0.5, 0.9, 0.95, 0.98, 0.99)] == [1, 2, 3, 3, 4]
    assert found.energy(2) == pytest.approx(80 / 85, rel=1e-6)
    assert found.relative_error(2) == pytest.approx(math.sqrt(5 / 85), rel=1e-6)


def test_the_streamed_spectrum_is_that_of_the_whole_matrix(
    with_head: WithHead, monkeypatch: pytest.MonkeyPatch
):
    weight = torch.randn(301, 48, generator=torch.Generator().manual_seed(0)).bfloat16()
    monkeypatch.setattr(output_head, "BLOCK_NUMBERS", 48 * 17)
    head = with_head(weight)
    assert len(list(head.blocks())) == 18
    assert torch.equal(whole(head), weight.float())
    found = output_head.spectrum(head)
    _, values, vectors = torch.linalg.svd(weight.double(), full_matrices=False)
    torch.testing.assert_close(found.singular_values, values)
    torch.testing.assert_close((found.vectors * vectors.T).sum(0).abs(), torch.ones(48).double())


def test_tied_and_untied_heads_are_told_apart(tied: Path, untied: Path, tmp_path: Path):
    first, second = output_head.find(tied), output_head.find(untied)
    assert (first.name, first.tied, first.rows, first.hidden) == (
        "model.embed_tokens.weight",
        True,
        ROWS,
        HIDDEN,
    )
    assert (second.name, second.tied) == ("lm_head.weight", False)
    write_config(tmp_path, {**checkpoint.read_config(tied), "tie_word_embeddings": False})
    (tmp_path / "model.safetensors").write_bytes((tied / "model.safetensors").read_bytes())
    with pytest.raises(HeadError, match=r"has no lm_head\.weight, yet its config ties no embeddings"):
        output_head.find(tmp_path)


def test_a_head_without_numbers_is_refused(with_head: WithHead):
    with pytest.raises(HeadError, match="in 16 or 32 bits"):
        with_head(torch.zeros(64, 32, dtype=torch.int32))
    for bad in (torch.zeros(64, 32), torch.full((64, 32), math.nan)):
        with pytest.raises(HeadError, match="zero or not finite"):
            output_head.spectrum(with_head(bad))


@pytest.mark.parametrize("which", ["tied", "untied"])
def test_every_figure_equals_a_direct_computation(
    which: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
):
    folder: Path = request.getfixturevalue(which)
    # Several blocks of rows, in both passes.
    monkeypatch.setattr(output_head, "BLOCK_NUMBERS", HIDDEN * 100)
    report = measurement.analyse(folder, TEXTS, fractions=(0.25, 1.0))
    model = transformers.Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    weight = whole(output_head.find(folder))
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
        row.rank for row in report["heads"] if row.kind == "low_rank"
    }
    assert [row.group for row in report["heads"] if row.kind == "rounded"] == [32, 64]
    assert report["groups_left_out"] == [128]
    for row in report["heads"]:
        if row.kind == "low_rank":
            rank = row.rank
            changed = (left[:, :rank] * values[:rank]) @ right[:rank]
            assert row.bytes == (ROWS + HIDDEN) * rank * 2
        else:
            changed = round_to_nearest(weight, row.group, measurement.BITS).double()
            assert row.bytes == ROWS * HIDDEN // 2 + ROWS * HIDDEN // row.group * 2
        error = ((changed - weight).norm() / weight.norm()).item()
        assert row.relative_error == pytest.approx(error, rel=1e-4, abs=1e-7)
        after = mean(directly(changed))
        assert row.bits_per_byte.value == pytest.approx(after, rel=1e-5)
        assert row.bits_per_byte_change.value == pytest.approx(after - before, abs=1e-5)
        assert row.bits_per_byte_change.count == len(TEXTS)
    full = next(row for row in report["heads"] if getattr(row, "rank", None) == HIDDEN)
    assert full.bits_per_byte_change.value == pytest.approx(0, abs=1e-5)


def test_the_record_has_a_table_and_a_chart(tied: Path):
    body = {"variant": "tiny", "provenance": store.read(COMMITTED).provenance.model_dump(by_alias=True)}
    record = LmHead(**body, **measurement.analyse(tied, TEXTS))
    assert LmHead.model_validate_json(json.dumps(record.as_json(), allow_nan=False)) == record
    table = record.tables(COMMITTED)[0]
    assert [row[0] for row in table.rows][:1] == ["16 bit"]
    assert len(table.rows) == 1 + len(record.heads)
    chart = charts.of_record(record)
    charts.draw([chart])
    for label in ("energy", "low rank, 16 bit", "4 bit", "head, MB"):
        assert label in chart.svg
