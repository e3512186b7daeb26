"""``verify --faults``: ranks are killed, stopped, delayed and starved in the middle of ops, and the others watched."""
