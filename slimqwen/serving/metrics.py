"""Reader of a vLLM server's `/metrics`."""

from prometheus_client.parser import text_string_to_metric_families

_KV_CACHE_USAGE = "vllm:kv_cache_usage_perc"


def read_metrics(text: str) -> dict[str, float]:
    """Parse metrics in Prometheus' text format.

    Returns:
        Values by sample name, summed over engines (KV cache usage: the largest of all engines); the buckets of a
        histogram are named `<name>_bucket/<upper bound>`.

    Raises:
        ValueError: the text is in another format.
    """
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = f"{sample.name}/{sample.labels['le']}" if "le" in sample.labels else sample.name
            value = values.get(name, 0.0)
            values[name] = max(value, sample.value) if name == _KV_CACHE_USAGE else value + sample.value
    return values
