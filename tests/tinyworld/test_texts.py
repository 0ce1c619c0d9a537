"""The committed texts are what the world writes, and readers meet them in the order in which it made them."""

from itertools import islice
from pathlib import Path

from tinyworld.documents import LONG_MIX, DocumentSampler
from tinyworld.tasks import left_out_texts
from tinyworld.texts import PASSAGES_SEED, write_texts
from tinyworld.world import World

from slimqwen.recipe.calibration_text import CalibrationText, calibration_documents
from slimqwen.text import prompts
from slimqwen.variant import repository_root

FOLDER = repository_root() / "eval" / "texts"


def test_committed_texts_equal_their_regeneration(tmp_path):
    write_texts(tmp_path)
    written = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert written == {file.name: file.read_bytes() for file in FOLDER.glob("tinyworld*.jsonl")}


def test_calibration_reads_what_training_read():
    world = World()
    read = "".join(calibration_documents(CalibrationText(path="tinyworld", seed=0), FOLDER))
    documents = DocumentSampler(world, left_out_texts(world), LONG_MIX).stream(0)
    assert read.startswith("".join(document.text for document in islice(documents, 1_000)))


def test_workloads_read_every_passage_once_from_one_on_that_the_seed_chooses():
    first = list(prompts.documents("tinyworld_passages", PASSAGES_SEED, Path()))
    other = list(prompts.documents("tinyworld_passages", 1, Path()))
    assert len(first) == 6_000
    assert first != other
    start = other.index(first[0])
    assert other[start:] + other[:start] == first
