"""Tool: records what one call of an op overlaps, natively and fused."""
