"""Trains twice, natively and with ditron_train, by the user's own command, and compares every step."""
