"""GGUF files: headers read and checked, tensors as values, new files."""
