"""One meaning of document for every stage."""

import json

import pytest

from slimqwen.recipe.stages import calibrate, prune_vocab
from slimqwen.text.corpus import file_texts
from slimqwen.text.files import CorpusError


def test_stages_read_the_same_documents_of_a_file(tmp_path):
    file = tmp_path / "text.jsonl"
    texts = [f"document {number}\u2028of one line" for number in range(5)]
    blank = json.dumps({"text": " "}) + "\n"
    lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n\n" + blank for text in texts)
    file.write_text("".join(lines))
    source = {"source": "file", "path": file}
    assert list(prune_vocab.documents(prune_vocab.Corpus(**source))) == texts
    calibration = calibrate.documents(calibrate.Corpus(**source))
    assert sorted(calibration) == [f"{text}<|endoftext|>" for text in texts]


def test_a_chat_is_refused_where_text_is_read(tmp_path):
    file = tmp_path / "text.jsonl"
    file.write_text('{"text": "a"}\n{"messages": [{"role": "user"}]}\n')
    with pytest.raises(CorpusError, match=r"line 2: no text in it.*`slimqwen recipe corpus` renders chats"):
        list(file_texts(file))
