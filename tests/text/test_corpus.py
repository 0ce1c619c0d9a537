"""One meaning of document for every reader, and malformed text is an error with its line."""

import json

import pytest

from slimqwen.recipe.stages import calibrate, prune_vocab
from slimqwen.text.corpus import CorpusError, TextFile, file_texts


def test_a_text_file_is_cut_into_documents_of_8_kib_at_ends_of_lines(tmp_path):
    file = tmp_path / "book.txt"
    lines = [f"{number} {'ä' * 500}\n" for number in range(40)]
    file.write_text("".join(lines), encoding="utf-8")
    texts = list(file_texts(file))
    assert "".join(texts) == "".join(lines)
    assert all(text.endswith("\n") and len(text.encode()) >= 2**13 for text in texts[:-1])
    reader = TextFile(file)
    assert [reader.at(document.position).text for document in reader] == texts


def test_stages_read_the_same_documents_of_a_file(tmp_path):
    file = tmp_path / "text.jsonl"
    texts = [f"document {number}\u2028of one line" for number in range(5)]
    file.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n\n" for text in texts))
    source = {"source": "file", "path": file}
    assert list(prune_vocab.documents(prune_vocab.Corpus(**source))) == texts
    calibration = calibrate.documents(calibrate.Corpus(**source))
    assert sorted(calibration) == [f"{text}<|endoftext|>" for text in texts]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\nno json', "line 2: not JSON"),
        (b'{"txt": "a"}', "line 1: no text in it"),
        (b'{"messages": [{"role": "user"}]}', "line 1: no text in it"),
        (b"[1]", "line 1: no text in it"),
        (b"\xff", "line 1: not UTF-8"),
    ],
)
def test_malformed_text_is_an_error_with_its_line(tmp_path, content, message):
    file = tmp_path / "text.jsonl"
    file.write_bytes(content)
    with pytest.raises(CorpusError, match=message) as caught:
        list(file_texts(file))
    assert len(str(caught.value).splitlines()) == 1
