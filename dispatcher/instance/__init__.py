"""The instance slice: this daemon's own row, its heartbeat, and what an earlier daemon left."""
