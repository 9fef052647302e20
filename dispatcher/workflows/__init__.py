"""The workflows slice: hands runs to agents, tells them, and watches the runs to their end."""
