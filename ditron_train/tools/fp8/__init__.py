"""Tool: FP8 recipes in ``verify``, ``bench``, ``trace`` and ``compare``."""
