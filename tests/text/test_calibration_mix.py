"""What enters a mixed calibration text and what does not, that it repeats to the byte, and how it refuses."""

import hashlib
import json
import random
from pathlib import Path

import pytest
from tinyworld.tokenizer import END_OF_TEXT, chat_template

from slimqwen.recipe.calibration_text import CalibrationText, calibration_documents
from slimqwen.text.calibration_mix import Source, build_calibration_text, manifest_path
from slimqwen.text.files import CorpusError
from slimqwen.variant import repository_root
from tests.byte_tokenizer import byte_tokenizer

WORLD = Source("tinyworld", repository_root() / "eval" / "texts" / "tinyworld.jsonl")


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with a token a byte, and the tiny model's chat template."""
    wrapped = byte_tokenizer()
    wrapped.chat_template = chat_template()
    folder = tmp_path_factory.mktemp("tokenizer")
    wrapped.save_pretrained(folder)
    return folder


def sentences(count: int, seed: int, words: int = 30) -> list[str]:
    """Texts that share no shingle."""
    rng = random.Random(seed)
    return [" ".join(f"w{rng.randrange(10**6)}" for _ in range(words)) for _ in range(count)]


def jsonl(file: Path, texts: list[str]) -> Path:
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


def taken(file: Path) -> list[tuple[str, str]]:
    return [(line["source"], line["text"]) for line in map(json.loads, file.read_text().splitlines())]


def test_tokens_are_split_by_weight_and_counted_by_the_checkpoints_tokenizer(weights: Path, tmp_path: Path):
    sources = [
        Source("a", jsonl(tmp_path / "a.jsonl", sentences(300, 1)), 3.0),
        Source("b", jsonl(tmp_path / "b.jsonl", sentences(300, 2)), 1.0),
    ]
    result = tmp_path / "mixed.jsonl"
    manifest = build_calibration_text(weights, sources, 20_000, 0, result)
    a, b = manifest["sources"]
    assert a["tokens"] / b["tokens"] == pytest.approx(3, rel=0.1)
    assert 20_000 <= manifest["tokens"] < 20_300
    assert manifest["documents"] == len(taken(result)) == a["taken"] + b["taken"]
    assert manifest["tokens"] == sum(len(text) for _, text in taken(result))
    assert (a["documents"], a["ran_out"], manifest["tokens_wanted"]) == (300, False, 20_000)
    assert json.loads(manifest_path(result).read_text()) == manifest
    assert manifest["sha256"] == hashlib.sha256(result.read_bytes()).hexdigest()
    assert a["sha256"] == hashlib.sha256((tmp_path / "a.jsonl").read_bytes()).hexdigest()
    assert (
        manifest["tokenizer_sha256"] == hashlib.sha256((weights / "tokenizer.json").read_bytes()).hexdigest()
    )


def test_the_same_inputs_give_the_same_bytes_and_another_seed_does_not(weights: Path, tmp_path: Path):
    sources = [Source("a", jsonl(tmp_path / "a.jsonl", sentences(50, 1))), WORLD]
    one, two, three = (tmp_path / f"{name}.jsonl" for name in ("one", "two", "three"))
    first, second = (
        build_calibration_text(weights, sources, 6_000, 0, one),
        build_calibration_text(weights, sources, 6_000, 0, two),
    )
    assert one.read_bytes() == two.read_bytes()
    assert first == second
    build_calibration_text(weights, sources, 6_000, 1, three)
    assert one.read_bytes() != three.read_bytes()


def test_repetitions_are_dropped_within_a_source_and_across(weights: Path, tmp_path: Path):
    original, other = sentences(2, 1, words=40)
    words = original.split()
    mostly_new = " ".join(words[:15] + sentences(1, 4, words=40)[0].split())
    short = "only five words in it"
    a = jsonl(tmp_path / "a.jsonl", [original, original.replace(" ", "\n  "), mostly_new, short])
    b = jsonl(tmp_path / "b.jsonl", [other, short])
    manifest = build_calibration_text(
        weights, [Source("a", a), Source("b", b)], 10**6, 0, tmp_path / "out.jsonl"
    )
    assert manifest["documents"] == 4
    assert sum(source["duplicates"] for source in manifest["sources"]) == 2
    assert {" ".join(text.split()) for _, text in taken(tmp_path / "out.jsonl")} == {
        original,
        mostly_new,
        short,
        other,
    }


def test_texts_that_share_more_than_half_of_their_shingles_are_repetitions(weights: Path, tmp_path: Path):
    (original,) = sentences(1, 1, words=40)
    words = original.split()
    # Of 28 shingles, the first n - 12 are shared.
    for shared, dropped in ((26, 0), (27, 1)):
        changed = " ".join([*words[:shared], *sentences(1, 3, words=40 - shared)[0].split()])
        near = jsonl(tmp_path / "near.jsonl", [changed, original])
        manifest = build_calibration_text(weights, [Source("near", near)], 10**6, 0, tmp_path / "out.jsonl")
        assert manifest["sources"][0]["near_duplicates"] == dropped


def test_a_source_that_runs_out_gives_its_share_to_the_others(weights: Path, tmp_path: Path):
    sources = [
        Source("few", jsonl(tmp_path / "few.jsonl", sentences(2, 1)), 10.0),
        Source("many", jsonl(tmp_path / "many.jsonl", sentences(200, 2))),
    ]
    manifest = build_calibration_text(weights, sources, 8_000, 0, tmp_path / "out.jsonl")
    few, many = manifest["sources"]
    assert (few["taken"], few["ran_out"], many["ran_out"]) == (2, True, False)
    assert few["tokens"] + many["tokens"] == manifest["tokens"] >= 8_000
    manifest = build_calibration_text(weights, sources, 10**6, 0, tmp_path / "out.jsonl")
    assert manifest["tokens"] < manifest["tokens_wanted"]
    assert all(source["ran_out"] for source in manifest["sources"])


def test_chats_are_rendered_by_the_checkpoints_template(weights: Path, tmp_path: Path):
    file = tmp_path / "chat.jsonl"
    messages = [
        {"role": "user", "content": "Who keeps the ferry?"},
        {"role": "assistant", "content": "Nula, since the flood."},
    ]
    file.write_text(json.dumps({"messages": messages}) + "\n\n")
    build_calibration_text(weights, [Source("chat", file)], 100, 0, tmp_path / "out.jsonl")
    assert taken(tmp_path / "out.jsonl") == [
        (
            "chat",
            "<|im_start|>user\nWho keeps the ferry?<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\nNula, since the flood.<|im_end|>\n",
        )
    ]


def test_a_folder_of_parquet_is_read_as_a_data_set(weights: Path, tmp_path: Path):
    import pyarrow
    from pyarrow import parquet

    folder = tmp_path / "set" / "data"
    folder.mkdir(parents=True)
    texts = sentences(6, 1)
    for part in range(2):
        table = pyarrow.table({"text": texts[part::2], "topic": ["none"] * 3})
        parquet.write_table(table, folder / f"train-0000{part}.parquet")
    (tmp_path / "out").mkdir()
    result = tmp_path / "out" / "mixed.jsonl"
    manifest = build_calibration_text(weights, [Source("set", folder.parent)], 10**6, 0, result)
    assert sorted(text for _, text in taken(result)) == sorted(texts)
    assert manifest["sources"][0]["documents"] == 6
    assert sorted(file.name for file in result.parent.iterdir()) == ["mixed.jsonl", "mixed.manifest.json"]


def test_what_was_understood_is_shown_before_a_document_is_taken(weights: Path, tmp_path: Path):
    chat = {"conversations": [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "Nula."}]}
    (tmp_path / "chats.json").write_text(json.dumps([{"conversations": []}, chat]))
    events: list[str] = []
    manifest = build_calibration_text(
        weights,
        [Source("chats", tmp_path / "chats.json")],
        10,
        0,
        tmp_path / "out.jsonl",
        lambda activity, *_: events.append(activity),
        lambda name, understood: events.append(f"{name}: {understood.describe()}: {understood.example}"),
    )
    reading, again, shown, taking = events
    assert (reading, again, taking) == ("reading chats", "reading chats", "taking documents")
    assert shown.startswith(
        "chats: 1 ShareGPT chat; 1 left out, for it is empty: chats.json, line 1: <|im_start|>user"
    )
    assert manifest["sources"][0]["styles"] == {"ShareGPT chat": 1}


def test_the_faults_of_all_sources_come_at_once(weights: Path, tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{}\n')
    (tmp_path / "b.csv").write_text("text,id\none\n")
    kings = [{"messages": [{"role": "king", "content": word}]} for word in ("one", "two")]
    (tmp_path / "c.json").write_text(json.dumps(kings))
    a, b, c = (Source(file.name, file) for file in sorted(tmp_path.iterdir()))
    for sources, count in (([a, b], 2), ([c], 2)):
        with pytest.raises(CorpusError) as caught:
            build_calibration_text(weights, sources, 10**6, 0, tmp_path / "out.jsonl")
        assert len(caught.value.faults) == count
    assert all("the chat cannot be rendered (Unknown role: king)" in fault for fault in caught.value.faults)


def test_text_files_are_cut_at_ends_of_lines(weights: Path, tmp_path: Path):
    file = tmp_path / "book.txt"
    lines = [f"{text}\n" for text in sentences(120, 1)]
    file.write_text("".join(lines))
    build_calibration_text(weights, [Source("book", file)], 10**6, 0, tmp_path / "out.jsonl")
    texts = [text for _, text in taken(tmp_path / "out.jsonl")]
    assert len(texts) == 4
    assert all(text.endswith("\n") for text in texts)
    assert sorted(line for text in texts for line in text.splitlines(keepends=True)) == sorted(lines)


def test_calibrate_reads_it_and_every_document_is_whole(weights: Path, tmp_path: Path):
    texts = [*sentences(3, 1), "a line\u2028separator and an umlaut: Gänse"]
    sources = [Source("a", jsonl(tmp_path / "a.jsonl", texts)), WORLD]
    result = tmp_path / "out.jsonl"
    build_calibration_text(weights, sources, 20_000, 0, result)
    read = list(calibration_documents(CalibrationText(path=result), weights))
    assert sorted(read) == sorted(text + END_OF_TEXT for _, text in taken(result))
    assert not any(END_OF_TEXT in text for _, text in taken(result))
    assert {text for source, text in taken(result) if source == "a"} == set(texts)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "fine"}\n{"text": \n', "line 2: not JSON"),
        (b'{"text": "fine"}\n{"prompt": "Once"}\n', "line 2: the chat cannot be rendered .it is a prompt"),
        (
            b'{"text": "fine"}\n{"messages": [{"role": "king", "content": ""}]}\n',
            "line 2: the chat cannot be rendered .Unknown role: king",
        ),
        (b'{"text": " "}\n\n', "has no text; add documents to it"),
        (b"", "has no text; add documents to it"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    weights: Path, tmp_path: Path, content: bytes, message: str
):
    file = tmp_path / "in.jsonl"
    file.write_bytes(content)
    with pytest.raises(CorpusError, match=message) as caught:
        build_calibration_text(weights, [Source("a", file)], 10**6, 0, tmp_path / "out.jsonl")
    assert len(str(caught.value).splitlines()) == 1
    assert list(tmp_path.iterdir()) == [file]


def test_what_cannot_be_built_is_refused(weights: Path, tmp_path: Path):
    a = Source("a", jsonl(tmp_path / "a.jsonl", ["text"]))
    empty, odd = tmp_path / "empty", tmp_path / "a.docx"
    empty.mkdir()
    odd.touch()
    for sources, tokens, name, message in (
        ([Source("a", tmp_path / "none.jsonl")], 1, "out.jsonl", "none.jsonl: cannot be read"),
        ([Source("a", odd)], 1, "out.jsonl", "unknown format; name a file that ends in"),
        ([Source("a", empty)], 1, "out.jsonl", "has no file that can be read"),
        ([a, a], 1, "out.jsonl", "2 sources have the name a; give each .*, as by --source NAME=FILE"),
        ([], 1, "out.jsonl", "there is no source; give at least one"),
        ([a], 0, "out.jsonl", "ask for at least 1"),
        ([a], 1, "out.txt", "is not a .jsonl file"),
        ([a], 1, "none/out.jsonl", "is not a .jsonl file in an existing folder"),
    ):
        with pytest.raises(CorpusError, match=message) as caught:
            build_calibration_text(weights, sources, tokens, 0, tmp_path / name)
        assert len(str(caught.value).splitlines()) == 1
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.docx", "a.jsonl", "empty"]
