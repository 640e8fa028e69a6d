"""Losses of draft rows against labels or the trunk's distribution, with their gradients.

`rows.py` is the entry: per-row losses, chunked so that memory does not grow with the vocabulary or
the number of depths. `combine.py` turns them into one number that `backward()` can start from.
"""
