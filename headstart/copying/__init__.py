"""Drafts that are copied from a text: its own earlier part, or answers to other requests."""
