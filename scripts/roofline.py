"""Say how fast a variant could be on a GPU at most, and write a record roofline and its plot into results/."""

import argparse
import sys
from typing import Any

from _console import console, run, table

from slimqwen import checkpoint, variant
from slimqwen.evaluation import roofline
from slimqwen.records import provenance, results
from slimqwen.report import plots


def main() -> int:
    """Parse, count, write the record and its plot, show the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", required=True)
    parser.add_argument("--gpu", required=True, help="a name of eval/devices.yaml, such as a10g")
    parser.add_argument(
        "--with",
        nargs="+",
        default=[],
        dest="others",
        metavar="VARIANT",
        help="compared in addition to the variant's baseline",
    )
    parser.add_argument(
        "--contexts",
        type=int,
        nargs="+",
        default=roofline.CONTEXTS,
        help="tokens in the cache (default: 128 2048 8192, cut to what is served)",
    )
    parser.add_argument(
        "--acceptance-length",
        type=float,
        help="assumed where no acceptance record (make sweep-k) says it",
    )
    arguments = parser.parse_args()
    one, started = variant.load(arguments.variant), provenance.utc_now()
    gpu = roofline.gpu(arguments.gpu, one.root)
    compared = roofline.chain(one, arguments.others)
    found = roofline.analyse(compared, gpu, arguments.contexts, arguments.acceptance_length)
    devices = checkpoint.sha256(one.root / "eval" / "devices.yaml")
    record = results.write("roofline", one, found, command=sys.argv, started=started, devices=devices)
    plots.beside(record)
    show(found)
    console.print(
        f"record: {record.relative_to(one.root)}, plot: {record.with_suffix('.svg').relative_to(one.root)}",
        markup=False,
        soft_wrap=True,
    )
    return 0


def show(found: dict[str, Any]) -> None:
    """Tables of decoding, of prompts and of what has been measured, then what the bounds rest on."""
    speeds = ("tokens/s, 1 seq.", "/ baseline", "seqs", "tokens/s, all", "/ baseline", "limited by")
    decode = table(["decode: variant"], ["K", "context", "weights, MB/step", *speeds])
    prefill = table(["prefill: variant"], ["prompt", "ms", "tokens/s", "MFLOP/token", "limited by"])
    measured = table(
        ["measured: variant"], ["class", "prompt -> output", "concurrency", "tokens/s", "bound", "of bound"]
    )
    for one in found["variants"]:
        for row in one["decode"]:
            decode.add_row(
                one["variant"],
                str(row["depth"]),
                f"{row['context']:,}",
                f"{row['weights_bytes_per_step'] / 1e6:,.1f}",
                f"{row['one']['tokens_per_second']:,.1f}",
                f"{row['one_over_baseline']:.2f}x",
                str(row["all"]["sequences"]),
                f"{row['all']['tokens_per_second']:,.1f}",
                f"{row['all_over_baseline']:.2f}x",
                row["all"]["limited_by"],
            )
        for row in one["prefill"]:
            prefill.add_row(
                one["variant"],
                f"{row['tokens']:,}",
                f"{1000 * row['seconds']:,.3f}",
                f"{row['tokens_per_second']:,.0f}",
                f"{row['operations_per_token'] / 1e6:,.1f}",
                row["limited_by"],
            )
        for row in one["measured"]:
            measured.add_row(
                one["variant"],
                row["class"],
                f"{row['prompt_tokens']} -> {row['output_tokens']}",
                str(row["concurrency"]),
                f"{row['tokens_per_second']:,.1f}",
                f"{row['bound_tokens_per_second']:,.1f}",
                f"{row['share_of_bound']:.1%}",
            )
    gpu = found["gpu"]
    peaks = ", ".join(f"{name} {peak:g}" for name, peak in gpu["dense_peak_tflops"].items() if peak)
    console.print(
        f"{gpu['name']}: {gpu['memory_bandwidth_gb_per_s']:g} GB/s, dense peak {peaks} TFLOP/s ({gpu['source']})"
    )
    for shown in (decode, prefill, measured):
        if shown.row_count:
            console.print(shown)
    for note in (*filter(None, [gpu["note"]]), *found["notes"]):
        console.print(note, markup=False)
    console.print(f"Assumed: {'; '.join(found['assumptions'])}.", markup=False)


if __name__ == "__main__":
    run(main)
