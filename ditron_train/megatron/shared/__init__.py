"""What the features of several parallelisms share."""
