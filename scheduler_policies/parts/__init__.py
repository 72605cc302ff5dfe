"""Parts of several policies: turns of owners, shares, a table of measurements, and control of best-effort work."""
