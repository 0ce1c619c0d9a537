"""The table of `slimqwen fit` over GPUs."""

from slimqwen import variant
from slimqwen.fit import tables
from slimqwen.fit.memory import ServerSettings
from slimqwen.fit.subject import find_subject

ROOT = variant.repository_root()


def test_each_gpu_has_a_row_with_the_first_form_that_fits() -> None:
    subject = find_subject("qwen3-8b", ROOT)
    table = tables.gpus_table(subject, ServerSettings.of(subject, None, None), ROOT)
    rows = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert list(rows) == list(tables.TABLE_GPUS)
    small, large = rows["rtx-3060"], rows["h100"]
    assert small["as stored"] == "11.5 GB too much"
    assert "8-bit embedding" in small["fits with"]
    assert "64k tokens" in rows["rtx-4070"]["fits with"]
    assert (large["as stored"], large["fits with"], large["with drafts"]) == (
        "fits, 53.7 GB left",
        "as stored",
        "-",
    )
    assert table.columns[: table.text_columns] == ("GPU",)
    assert large["left, GB"] == "53.7"
    assert float(small["tok/s"]) < float(large["tok/s"])
