"""Learning while serving: what is collected, how a head learns from it, and when it is swapped."""
