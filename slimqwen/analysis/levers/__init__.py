"""Levers on decode speed, timed on this CPU at a real model's shape, and the cost model held against them.

A lever is a variant that changes what one decode step reads: its drafts' output head, its vocabulary, the width of its
weights or of its recurrent state. `device` measures what this CPU can do, `prediction` turns that and the checkpoint's
tensors into a step time before anything is timed, `turns` times the variants in turns in processes of their own, and
`record` holds both beside each other.

Where a checkpoint's weights are random and its acceptance is set, the figures are about speed and memory only.
"""
