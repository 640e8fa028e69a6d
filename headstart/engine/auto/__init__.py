"""`auto`: how many tokens each request drafts, by acceptance rates and what rounds cost."""
