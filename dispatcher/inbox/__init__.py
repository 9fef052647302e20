"""The inbox slice: which agent may be woken, and what to tell it."""
