import json
from itertools import count, islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from slimqwen.text import prompts
from slimqwen.text.files import CorpusError
from slimqwen.variant import repository_root


def words(text):
    return [hash(word) for word in text.split()]


def numbered(size=7):
    """Documents without a shared word."""
    return (" ".join(f"{n}-{k}" for k in range(size)) for n in count())


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 40)), min_size=1, max_size=5))
def test_prompts_have_the_exact_length_and_share_no_text(orders):
    cutter = prompts.PromptCutter(numbered(), words)
    seen = set()
    for number, length in orders:
        cut = cutter.cut(number, length)
        assert [len(prompt) for prompt in cut] == [length] * number
        for prompt in cut:
            assert seen.isdisjoint(prompt)
            seen.update(prompt)


def test_a_prompt_is_never_given_twice_even_if_the_text_repeats():
    cutter = prompts.PromptCutter(iter(["the same start"] * 5 + ["another start here"]), words)
    assert len(set(map(tuple, cutter.cut(2, 3)))) == 2


def test_text_that_does_not_last_is_an_error():
    with pytest.raises(CorpusError, match="used up"):
        prompts.PromptCutter(islice(numbered(), 3), words).cut(2, 20)


def test_a_text_file_is_cut_at_its_empty_lines(tmp_path):
    (tmp_path / "book.txt").write_bytes(b"\xef\xbb\xbfone\r\nline\r\n\r\n\r\ntwo\r\n\r\nthree")
    parts = ["one\nline", "two", "three"]
    found = {tuple(prompts.documents("book.txt", seed, tmp_path)) for seed in range(20)}
    assert found == {tuple(parts[start:] + parts[:start]) for start in range(3)}


def test_lines_of_a_jsonl_file_are_documents(tmp_path):
    (tmp_path / "text.jsonl").write_text('{"text": "one\\n\\npart"}\n{"text": " "}\n')
    assert list(prompts.documents("text.jsonl", 0, tmp_path)) == ["one\n\npart"]


def test_a_text_that_is_missing_or_empty_is_told(tmp_path):
    (tmp_path / "empty.txt").touch()
    for name, message in (
        ("gone.txt", r"gone\.txt: cannot be read"),
        ("gone", r"eval/texts/gone\.jsonl: cannot"),
    ):
        with pytest.raises(CorpusError, match=message):
            next(prompts.documents(name, 0, tmp_path))
    with pytest.raises(CorpusError, match="used up"):
        prompts.PromptCutter(prompts.documents("empty.txt", 0, tmp_path), words).cut(1, 2)


def test_a_chat_is_no_document_of_a_workload(tmp_path):
    (tmp_path / "text.jsonl").write_text(
        '{"text": "a"}\n{"messages": []}\n{"messages": [{"role": "user"}]}\n'
    )
    with pytest.raises(
        CorpusError, match=r"line 3: a chat or a prompt instead of a text.*`slimqwen recipe corpus`"
    ):
        next(prompts.documents("text.jsonl", 0, tmp_path))


def test_a_digest_tells_prompts_and_their_order_apart():
    digests = {prompts.digest(p) for p in ([[1, 2], [3]], [[3], [1, 2]], [[1], [2, 3]])}
    assert len(digests) == 3


def test_a_cutter_continues_where_another_one_stopped():
    first = prompts.PromptCutter(numbered(), words)
    before, used = first.cut(3, 10), first.documents_used
    second = prompts.PromptCutter(numbered(), words)
    second.cut(1, 5)
    second.advance_to(used, before)
    assert (used, second.documents_used) == (6, 6)
    assert second.cut(2, 10) == first.cut(2, 10)

    third = prompts.PromptCutter(iter(["used", "a b", "a b", "c d"]), words)
    third.advance_to(1, [words("a b")])
    assert third.cut(1, 2) == [words("c d")]


def test_prompts_of_a_checkpoint_are_of_its_tokenizer(tmp_path):
    (tmp_path / "text.jsonl").write_text('{"text": "The red boat."}\n')
    weights = repository_root() / "weights" / "tiny"
    cutter = prompts.PromptCutter.for_checkpoint(weights, "text.jsonl", 0, tmp_path)
    assert cutter.cut(1, 4) == [AutoTokenizer.from_pretrained(weights)("The red boat.\n")["input_ids"][:4]]


def test_own_prompts_are_text_as_it_is_or_chats_by_the_template(tmp_path: Path) -> None:
    file, tiny = tmp_path / "prompts.jsonl", repository_root() / "weights" / "tiny"
    chat = [{"role": "user", "content": "Where does Baizela live?"}]
    rows = [{"prompt": "Once  upon\na time"}, {"messages": chat, "output_tokens": 7}]
    file.write_text("\n".join(map(json.dumps, rows)))
    (text, no_length), (rendered, length) = prompts.read_own_prompts(file, tiny)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    assert tokenizer.decode(text) == "Once  upon\na time"
    assert tokenizer.decode(rendered) == tokenizer.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True
    )
    assert (no_length, length) == (None, 7)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("prompts.json", '["Once", "Twice"]'),
        ("prompts.json", '[{"prompt": "Once"}, {"prompt": "Twice", "output_tokens": 9}]'),
        ("prompts.csv", "\ufeffoutput_tokens;prompt\n;Once\n9;Twice\n"),
    ],
)
def test_own_prompts_are_a_list_of_texts_or_a_table(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    once, twice = prompts.parse_own_prompts(tmp_path / name)
    assert (once.prompt, once.output_tokens, twice.prompt) == ("Once", None, "Twice")
    assert twice.output_tokens == (9 if "output" in text else None)


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"text": "?"}, "give either prompt or messages"),
        ({"prompt": "?", "messages": [{"role": "user", "content": "?"}]}, "give either prompt or messages"),
        ({"prompt": "?", "output_tokens": 1}, "greater than or equal to 2"),
        ({"prompt": ""}, "at least 1 character"),
        ({"messages": []}, "at least 1 item"),
        ({"messages": [{"content": "?"}]}, "a message has no role"),
    ],
)
def test_an_own_prompt_that_cannot_be_sent_is_named(tmp_path: Path, row: object, fault: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, [{"prompt": "?"}, row])))
    with pytest.raises(CorpusError, match=rf"prompts\.jsonl.* 2: unusable prompt \(.*{fault}"):
        prompts.read_own_prompts(file, repository_root() / "weights" / "tiny")
    file.write_text(json.dumps({"prompt": "Once"}))
    with pytest.raises(CorpusError, match="1 prompts are too few"):
        prompts.read_own_prompts(file, repository_root() / "weights" / "tiny")


def test_of_many_own_prompts_that_cannot_be_sent_the_first_are_named_and_all_counted(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"text": "?"}\n' * 500)
    with pytest.raises(CorpusError) as caught:
        prompts.parse_own_prompts(file)
    *named, total = caught.value.faults
    assert len(named) == 20
    assert total == f"{file}: 500 faults in all, of which these are the first 20"
