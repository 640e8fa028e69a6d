"""Chat templates, run in other processes: they are programs that come with a model."""
