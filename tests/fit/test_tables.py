"""The tables of `slimqwen fit`: over GPUs, and of a checkpoint after each optimisation."""

from slimqwen import variant
from slimqwen.fit import tables
from slimqwen.fit.memory import ServerSettings
from slimqwen.fit.subject import find_subject
from slimqwen.fit.verdict import fit_on_gpus
from slimqwen.plan.devices import read_gpus

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


def test_each_step_of_a_checkpoint_has_the_sizes_of_its_parts() -> None:
    subject = find_subject("qwen3-8b", ROOT)
    settings = ServerSettings.of(subject, None, None)
    fits = fit_on_gpus(subject, settings, [read_gpus(ROOT)["rtx-3060"]])["rtx-3060"]
    table = tables.steps_table(subject, settings, "rtx-3060", fits)
    stored, packed = (dict(zip(table.columns, row, strict=True)) for row in table.rows[:2])
    mlp, embedding = 36 * 3 * 4096 * 12288, 151936 * 4096
    assert (stored["checkpoint"], packed["checkpoint"]) == ("as stored", "+ 4-bit MLPs")
    assert (stored["MLP"], stored["embedding"]) == (f"{2 * mlp / 1e9:.2f}", f"{2 * embedding / 1e9:.2f}")
    assert float(packed["MLP"]) < float(stored["MLP"]) / 3
    assert packed["attention"] == stored["attention"]
