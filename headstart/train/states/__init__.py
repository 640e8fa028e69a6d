"""Hidden states of the frozen trunk, kept on disk so that later runs need no trunk pass.

A cache folder holds `header.json` (what the states are), `shard-00000.bin` and so on (the states,
many records a file), and `index.json` (where each record lies, and checksums). The index is written
last: a folder without one is unfinished, and only `writer.py` may go on with it.
"""
