"""One meaning of document for every stage."""

import json

import pytest

from slimqwen.recipe.calibration_text import CalibrationText, calibration_documents
from slimqwen.recipe.stages import prune_vocab
from slimqwen.text.corpus import TextSource, file_digest, find_named_corpus, named_corpus_path, resolve_text
from slimqwen.text.files import CorpusError
from slimqwen.variant import repository_root


def test_stages_read_the_same_documents_of_a_file(tmp_path):
    file = tmp_path / "text.jsonl"
    texts = [f"document {number}\u2028of one line" for number in range(5)]
    blank = json.dumps({"text": " "}) + "\n"
    lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n\n" + blank for text in texts)
    file.write_text("".join(lines))
    assert list(prune_vocab.counted_documents(prune_vocab.CountedText(path=file), tmp_path, [])) == texts
    calibration = calibration_documents(CalibrationText(path=file), tmp_path)
    assert sorted(calibration) == [f"{text}<|endoftext|>" for text in texts]


def test_a_name_is_that_of_a_text_and_everything_else_a_path(tmp_path):
    texts = repository_root() / "eval" / "texts"
    assert resolve_text("tinyworld", tmp_path) == texts / "tinyworld.jsonl"
    for path in ("text.jsonl", "./tinyworld.txt", "a/tinyworld", str(texts / "tinyworld.jsonl")):
        assert resolve_text(path, tmp_path) == tmp_path / path


def test_a_recipe_names_its_text_by_path_or_name(tmp_path):
    def path(**values):
        return TextSource.model_validate(values, context={"folder": tmp_path}).path

    named = repository_root() / "eval" / "texts" / "tinyworld.jsonl"
    assert path(path="tinyworld") == named
    assert path(path="a.jsonl") == tmp_path / "a.jsonl"
    assert "path" not in TextSource.model_validate({"path": "a.jsonl"}).model_dump()


def test_a_digest_is_of_the_content_and_of_the_names_in_a_folder(tmp_path):
    for name, text in {
        "a/one.txt": "wool",
        "b/one.txt": "wool",
        "c/two.txt": "wool",
        "d/one.txt": "salt",
    }.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    of_folders = {name: file_digest(tmp_path / name, "corpus") for name in "abcd"}
    assert of_folders["a"] == of_folders["b"]
    assert len(set(of_folders.values())) == 3
    assert file_digest(tmp_path / "a" / "one.txt", "corpus") == file_digest(
        tmp_path / "c" / "two.txt", "corpus"
    )
    with pytest.raises(CorpusError, match=r"none\.txt: cannot be read \(No such file.*put the corpus there"):
        file_digest(tmp_path / "none.txt", "corpus")


def test_a_mix_is_found_by_its_path_whatever_its_name_and_that_of_its_base(tmp_path):
    (tmp_path / "eval" / "corpora").mkdir(parents=True)
    for name in ("long", "long-mix"):
        (tmp_path / "eval" / "corpora" / f"{name}.yaml").touch()
    for found in (("long-mix", "qwen3.5-4b"), ("long", "tiny")):
        assert find_named_corpus(named_corpus_path(*found, tmp_path), tmp_path) == found
    for path in ("corpora/other-tiny.jsonl", "long-tiny.jsonl", "corpora/long.jsonl"):
        assert find_named_corpus(tmp_path / path, tmp_path) is None
