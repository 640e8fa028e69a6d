"""Noise, logit processors, the target's choice and both acceptance rules, as pure functions.

Used by the engine, the simulator and tests. Only `params` is free of torch, so that the command
line and the server's schemas can import it cheaply.
"""
