"""Device facts, errors, logging, settings, supported versions. Nothing is imported here: what says that torch
is missing must work without it."""
