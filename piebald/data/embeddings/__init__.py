"""Frozen extractors, and rows as their embeddings.

Partitions by embedding, models on top of an extractor and the inputs of an experiment use them.  What is
trained lies in `models`.
"""
