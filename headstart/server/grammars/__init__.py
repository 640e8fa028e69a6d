"""Grammars that answers keep to: what clients ask for, checked, compiled in another process."""
