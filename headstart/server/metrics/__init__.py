"""What the server counts, and how it is exposed to Prometheus."""
