"""Tool: proves on the user's own machines and shapes that every op has the bits of the native path."""
