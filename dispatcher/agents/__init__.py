"""One `openclaw agent` process and the table of live ones."""
