"""Language models: families as data, dimensions, loading, the MTP head, vocabularies, errors of quantised layers."""
