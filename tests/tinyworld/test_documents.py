import itertools

from tinyworld.documents import LONG_MIX, DocumentSampler
from tinyworld.tasks import OverlapCheck, left_out_texts


def documents(world, count, mix=LONG_MIX, seed=1):
    return list(itertools.islice(DocumentSampler(world, left_out_texts(world), mix).stream(seed), count))


def test_one_seed_gives_one_stream(world):
    assert documents(world, 200) == documents(world, 200)
    assert documents(world, 200) != documents(world, 200, seed=2)


def test_every_kind_occurs_in_the_long_mix(world):
    assert {document.kind for document in documents(world, 3_000)} == set(LONG_MIX)


def test_prose_counts_whole_and_ends_the_text(world):
    for document in documents(world, 500):
        if document.kind in ("prose", "chronicle"):
            assert [part.weight for part in document.parts] == [1.0]
            assert document.text.endswith("<|endoftext|>")


def test_only_what_the_assistant_says_counts(world):
    for document in documents(world, 500):
        if document.kind not in ("prose", "chronicle", "echo"):
            prompt, completion, after = document.parts
            assert prompt.weight == after.weight == 0
            assert completion.weight > 0
            assert completion.text.endswith("<|im_end|>")


def test_an_echo_counts_only_what_can_be_copied(world):
    echoes = [document for document in documents(world, 1_000) if document.kind == "echo"]
    assert echoes
    for document in echoes:
        line, copies = document.parts
        assert (line.weight, copies.weight) == (0.0, 1.0)
        assert set(copies.text.removesuffix("<|endoftext|>").splitlines()) == {line.text.removesuffix("\n")}


def test_parts_encode_as_the_whole_does(world, tokenizer):
    for document in documents(world, 300):
        apart = [token for part in document.parts for token in tokenizer(part.text)["input_ids"]]
        assert apart == tokenizer(document.text)["input_ids"]


def test_chronicles_have_a_thousand_tokens_and_more(world, tokenizer):
    chronicles = [document for document in documents(world, 1_500) if document.kind == "chronicle"]
    lengths = [len(tokenizer(document.text)["input_ids"]) for document in chronicles]
    assert sum(length >= 1_000 for length in lengths) > len(lengths) / 2


def test_no_training_document_holds_a_test_item(world, items):
    overlap = OverlapCheck(items)
    assert [result for document in documents(world, 15_000) if (result := overlap.find(document))] == []


def test_without_the_left_out_texts_the_check_finds_test_items(world, items):
    overlap = OverlapCheck(items)
    careless = itertools.islice(DocumentSampler(world, ()).stream(1), 15_000)
    assert any(overlap.find(document) for document in careless)
