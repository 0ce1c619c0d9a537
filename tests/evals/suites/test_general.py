"""The suite `general`: items by written rules; tasks without data are left out by name."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from eval.tasks.general import items
from slimqwen.evals.suites.suite import Suite

ROOT = Path(__file__).parents[3]
LONG = (
    "The committee of the town met in the old hall by the river and spoke for a long time about the bridge "
    * 2
)
ARTICLE = f"= Town =\n\n {LONG}until the evening . \n The <unk> said it @-@ self . \n {LONG}<unk> before it closed . \n"


def test_a_passage_ends_before_a_clear_last_word(tmp_path: Path) -> None:
    (tmp_path / "wikitext_test.txt").write_text(ARTICLE)

    assert items.last_words(str(tmp_path))["test"].to_list() == [
        {"passage": f"{LONG}until the", "answer": "evening"}
    ]


def test_text_is_joined_up_to_a_length_and_reads_as_before_it_was_parted(tmp_path: Path) -> None:
    (tmp_path / "wikitext_test.txt").write_text(
        f"{ARTICLE} = = = Part = = = \n {LONG}\n = Other = \n Short . \n"
    )
    ((text,),) = [row.values() for row in items.texts(str(tmp_path))["test"]]

    assert text.startswith("= Town =\n")
    assert "evening.\nThe <unk> said it-self.\n" in text


def test_pairs_are_the_same_from_the_hub_and_from_a_folder(tmp_path: Path) -> None:
    for name in ("hub", "folder"):
        (tmp_path / name).mkdir()
    table = pa.Table.from_pylist(
        [{"sentence_good": "They sleep.", "sentence_bad": "They sleeps.", "UID": "x"}]
    )
    pq.write_table(table, tmp_path / "hub/train.parquet")
    row = {"id": "x-0", "good": "They sleep.", "bad": "They sleeps."}
    (tmp_path / "folder/pairs.jsonl").write_text(json.dumps(row) + "\n")
    hub, folder = (items.pairs(str(tmp_path / name))["test"].to_list() for name in ("hub", "folder"))

    assert hub == folder == [{"options": ["They sleep.", "They sleeps."]}]


def test_the_repository_s_texts_have_enough_sentences_to_repeat() -> None:
    suite = Suite.load("general", ROOT)
    (task,) = (task for task in suite.tasks if task.name == "general_repeat")
    sentences = items.sentences(str(ROOT / "eval/texts/general_sentences.jsonl"))["test"]

    assert len(sentences) == len(_texts("general_sentences")) == task.items_to_decide
    assert items.repeated(sentences[0], [f'"{sentences[0]["sentence"]}"\n']) == {"exact_match": 1.0}
    assert items.repeated(sentences[0], [sentences[1]["sentence"]]) == {"exact_match": 0.0}


def test_no_text_of_the_gate_is_calibrated_on_and_no_sentence_is_in_another_text() -> None:
    read, calibrated = _texts("general"), _texts("general_calibration")
    others = "\n".join(" ".join(text.split()) for text in read | calibrated)

    assert len(read) == 200
    assert not read & calibrated
    assert not [sentence for sentence in _texts("general_sentences") if sentence in others]


def _texts(name: str) -> set[str]:
    lines = (ROOT / f"eval/texts/{name}.jsonl").read_text().splitlines()
    return {json.loads(line)["text"] for line in lines}
