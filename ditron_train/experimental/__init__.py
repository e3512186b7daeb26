"""What no timing on a quiet machine stands for yet: tests and tools run it, jobs never do."""
