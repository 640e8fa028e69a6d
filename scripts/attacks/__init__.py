"""Attacks of scripts/attack_check.py; each gives an `Outcome`."""
