"""What a variant claims."""

import pytest

from slimqwen.variant.claims import read_claims


@pytest.mark.parametrize(
    ("hypothesis", "claims"),
    [
        ("4-bit MLPs keep every task score within two points", ("quality",)),
        ("tiny with calibrate is faster and keeps every score within its margin.", ("speed", "quality")),
        ("A smaller checkpoint says the same.", ("memory", "quality")),
        ("A cheaper lm_head beats stock vLLM with less memory.", ("speed", "memory", "quality")),
        ("Breakfast is served.", ("quality",)),
    ],
)
def test_a_file_without_claims_claims_what_its_hypothesis_says(hypothesis, claims):
    assert read_claims(hypothesis) == claims
