"""The loss of language models (feature ``loss``)."""
