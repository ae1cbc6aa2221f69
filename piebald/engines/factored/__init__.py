"""Vectors kept as products of rows, and formed only when somebody reads them."""
