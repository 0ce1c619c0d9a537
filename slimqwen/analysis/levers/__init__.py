"""Levers on decode speed, timed on this CPU at a real model's shape, and a cost model compared with the times.

A lever is a variant that changes what one decode step reads: its drafts' output head, its vocabulary, the width of its
weights or of its recurrent state. `device` measures the rates of this CPU, `prediction` computes a step time from them
and the checkpoint's tensors before any step is timed, `turns` times the variants in turns in processes of their own,
and `record` puts both side by side.

Where a checkpoint's weights are random and its acceptance is set, the figures are about speed and memory only.
"""
