"""Frozen extractors, and rows as their embeddings.

Partitions by embedding, models on top of an extractor and the inputs of an experiment use them.  Networks that are
trained lie in `models`.
"""
