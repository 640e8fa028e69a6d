"""What the demo asks: short questions of different kinds, in our own words."""

from __future__ import annotations

WARM_UP = "Say hello."
PROMPTS = {
    "explaining": "Why does the sky look blue? Explain it to a child.",
    "writing": "Write a short thank-you note to a neighbour who watered my plants.",
    "math": "A pen costs 3 dollars. How much do 7 pens cost? Think step by step.",
    "code": "Write a Python function that returns the factorial of a number.",
    "lists": "Give five tips for sleeping well.",
}
