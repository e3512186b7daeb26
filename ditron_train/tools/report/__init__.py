"""Tool: one archive with what an issue needs."""
