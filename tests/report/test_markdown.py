"""Tables in Markdown files are made from records, and stay those of the records that they name."""

import json

import pytest

from slimqwen.evals.quality import Quality
from slimqwen.records import store
from slimqwen.report import markdown
from tests import record_files
from tests.report.two_variants import ITEMS


@pytest.fixture
def readme(repository):
    file = repository / "experiments" / "b" / "README.md"
    file.write_text(
        "# b\n\n<!-- table:comparison a b -->\n<!-- end -->\n\nText.\n\n<!-- table:results b -->\n<!-- end -->\n"
    )
    markdown.update_tables(repository)
    return file


def test_a_filled_readme_agrees_with_its_records(repository, readme):
    text = readme.read_text()
    assert text.startswith("# b\n\n<!-- table:comparison a b -->\n**Quality: a and b")
    assert "\nText.\n" in text
    assert markdown.update_tables(repository) == []


@pytest.mark.parametrize("figure", ["0.500", "100.0", "1.00x", "8.0 MB"])
def test_a_changed_figure_is_noticed(repository, readme, figure):
    text = readme.read_text()
    readme.write_text(text.replace(figure, "9.999", 1))
    assert markdown.update_tables(repository) == [readme]
    assert readme.read_text() == text


def test_a_newer_record_replaces_the_named_one_only_where_that_is_asked_for(repository, readme, quality):
    named = readme.read_text()
    path = record_files.write(repository / "experiments" / "b", quality | {"variant": "b"}, ITEMS)
    assert markdown.update_tables(repository) == []
    assert markdown.update_tables(repository, newest=True) == [readme]
    assert f"b/{path.name}" in readme.read_text()
    path.unlink()
    path.with_suffix(".items.jsonl").unlink()
    assert markdown.update_tables(repository) == [readme]  # without the record that it names, the newest
    assert readme.read_text() == named


def test_a_table_of_a_kind_shows_the_newest_record_of_each_topic(repository, readme, quality):
    folder = repository / "experiments" / "b"
    for _ in range(2):
        newest = record_files.write(folder, quality | {"variant": "b", "suite": "other"}, ITEMS)
    readme.write_text("# b\n\n<!-- table:quality b -->\n<!-- end -->\n")
    markdown.update_tables(repository)
    text = readme.read_text()
    assert text.count("**Quality of b**") == 2
    assert f"b/{newest.name}" in text


def test_other_pages_than_the_named_are_left_alone(repository, readme):
    readme.write_text(readme.read_text().replace("0.500", "9.999", 1))
    assert markdown.update_tables(repository, []) == []
    assert markdown.update_tables(repository, [readme]) == [readme]


def test_text_outside_the_blocks_is_left_alone(repository, readme):
    readme.write_text(readme.read_text().replace("Text.", "0.500 typed by hand."))
    assert markdown.update_tables(repository) == []


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("<!-- table:variants -->\n", "has no <!-- end --> after it"),
        ("<!-- table:variants -->\n<!-- table:results a -->\n<!-- end -->\n", "has no <!-- end --> after it"),
        ("<!-- table:comparison a -->\n<!-- end -->\n", "write <!-- table:comparison BASELINE VARIANT -->"),
        ("<!-- table:plans a -->\n<!-- end -->\n", "plans does not take a; write <!-- table:plans -->"),
        ("<!-- table:qualty a -->\n<!-- end -->\n", "there is no table 'qualty'; did you mean quality?"),
        ("<!-- table:nonsense -->\n<!-- end -->\n", "there is no table 'nonsense'; known are "),
    ],
)
def test_a_bad_block_is_named_with_its_file(repository, text, cause):
    (repository / "README.md").write_text(text)
    with pytest.raises(markdown.MarkdownError, match=cause) as error:
        markdown.update_tables(repository)
    assert str(error.value).startswith("README.md: ")


def test_a_record_changed_by_hand_does_not_reach_a_table(repository, readme):
    path = store.records(repository / "experiments" / "b", Quality)[0]
    record = json.loads(path.read_text())
    record["tasks"]["example_facts"]["value"] = "great"
    path.write_text(json.dumps(record))
    with pytest.raises(store.RecordError, match=path.name):
        markdown.update_tables(repository)
