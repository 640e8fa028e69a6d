"""HTML reports: one self-contained file of text, tables, charts and the data behind them."""
